#!/bin/bash
accelerate launch \
  train.py --epochs 3
