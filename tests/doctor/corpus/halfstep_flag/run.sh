#!/bin/bash
halfstep train recipe.yaml --fp16
