#!/bin/bash
python main.py fit --trainer.precision 16-mixed --config config.yaml
