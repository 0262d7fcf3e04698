#!/bin/bash
python train.py args.json
