"""Commands and bytes over SSH: by the user's OpenSSH, else by Paramiko."""
