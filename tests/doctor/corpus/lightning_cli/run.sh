#!/bin/bash
python main.py fit --config config.yaml
