"""The commands of ``kvt``, one file each; each imports what is heavy only when it is called."""
