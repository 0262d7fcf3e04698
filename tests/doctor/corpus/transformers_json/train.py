import sys

from transformers import HfArgumentParser, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
