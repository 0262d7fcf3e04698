#!/bin/bash
accelerate launch --config_file accelerate.yaml --mixed_precision fp16 train.py
