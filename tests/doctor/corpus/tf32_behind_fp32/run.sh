#!/bin/bash
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
python train.py
