#!/bin/bash
ACCELERATE_MIXED_PRECISION=BF16 python train.py
