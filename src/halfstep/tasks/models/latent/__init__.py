"""Diffusion in the latents of an autoencoder, from the parts of diffusers."""
