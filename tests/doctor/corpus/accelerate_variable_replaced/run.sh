#!/bin/bash
export ACCELERATE_MIXED_PRECISION=bf16
accelerate launch train.py
