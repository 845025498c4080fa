"""Wirings compared: small real training runs, and what is measured on them."""
