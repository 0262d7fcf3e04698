#!/bin/bash
accelerate launch --mixed_precision bf16 train.py
