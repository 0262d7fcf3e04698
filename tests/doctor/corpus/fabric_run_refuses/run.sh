#!/bin/bash
fabric run --precision 16-mixed train.py
