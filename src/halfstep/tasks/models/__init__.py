"""Models of the tasks: halfstep's own, and adapters to timm, segmentation-models-pytorch and diffusers."""
