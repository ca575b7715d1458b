"""What is made of the commands and their types when trashd is built: man pages and the JSON schema."""
