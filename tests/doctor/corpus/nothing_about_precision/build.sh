#!/bin/bash
python setup.py build
