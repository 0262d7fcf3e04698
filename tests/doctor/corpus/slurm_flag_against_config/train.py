import argparse

parser = argparse.ArgumentParser()
parser.add_argument('--config')
parser.add_argument('--fp16', action='store_true')
