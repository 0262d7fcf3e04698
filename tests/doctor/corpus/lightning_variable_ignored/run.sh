#!/bin/bash
PL_TRAINER_PRECISION=16-mixed python train.py
