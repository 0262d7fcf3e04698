#!/bin/bash
python main.py fit --config config.yaml --trainer.precision 16-mixed
