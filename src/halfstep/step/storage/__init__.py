"""Weights and optimizer states that are stored in other formats than fp32."""
