"""Run commands and transfer bytes over SSH: through the user's OpenSSH or through paramiko."""
