"""Wing 4 of the mount: the way by pyfuse3 and libfuse. Nothing else imports pyfuse3, and only life/ imports this."""
