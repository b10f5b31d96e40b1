"""The application: the HTTP service, its client and the command line."""
