#!/bin/bash
export LT_PRECISION=16-mixed
python train.py
