#!/bin/bash
python train.py --amp
