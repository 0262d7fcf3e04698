#!/bin/bash
torchrun --nproc_per_node 2 -m halfstep train recipe.yaml
