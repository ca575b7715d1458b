"""Plain mode: pyfuse3's handlers on trio. Nothing else imports pyfuse3, and only life/ imports this."""
