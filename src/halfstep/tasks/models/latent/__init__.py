"""Latent diffusion built from diffusers' modules."""
