"""Diagnosis: run a failed step again in several ways until its cause is known."""
