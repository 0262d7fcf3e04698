"""Language models of transformers, with a loss that is summed over tokens."""
