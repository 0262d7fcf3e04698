#!/bin/bash
accelerate launch --config_file accelerate.yaml train.py --mixed_precision bf16
