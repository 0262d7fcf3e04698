#!/bin/bash
python train.py trainer.precision=16-mixed
