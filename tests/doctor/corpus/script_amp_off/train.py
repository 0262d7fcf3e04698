import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--amp", default=False)
