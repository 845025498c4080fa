"""The demonstration that `addnorm demo` runs, one file for each part."""
