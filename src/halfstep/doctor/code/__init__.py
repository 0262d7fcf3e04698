"""Find mistakes about precision in Python code, by its syntax tree alone."""

from halfstep.doctor.code.checking import check_code, check_file

__all__ = ["check_code", "check_file"]
