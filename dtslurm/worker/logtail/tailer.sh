# The far side of log following where there is no Python: does what its standard input says, line by line, in the
# run's folder ($1). Every answer ends with a line of one dot; bytes are written as od writes them.
#   list 0 0 .             size and inode of every log file
#   read OFFSET COUNT NAME   bytes of a file
#   last LINES SIZE NAME     how many bytes the last lines of a file's first SIZE bytes have: 1 MiB or 64 KiB a line at most
cd "$1" 2>/dev/null || { echo "there is no folder $1" && exit 0; }
echo 'dtslurm shell 1'
while read -r word first second name; do
  case $word in
    list)
      set --
      for file in events.jsonl logs/batch*.log logs/*/node-*.log logs/*/rank-*.log metrics/*/train.jsonl \
        tasks/*/events.jsonl tasks/*/logs/*/node-*.log tasks/*/logs/*/rank-*.log; do
        [ -f "$file" ] && set -- "$@" "$file"
      done
      if [ $# -gt 0 ]; then
        wc -c -- "$@" | sed 's/^ */size /'
        # shellcheck disable=SC2012 # the names are known to be plain
        ls -i1 -- "$@" | sed 's/^ */inode /'
      fi
      ;;
    read) tail -c "+$((first + 1))" -- "$name" | head -c "$second" | od -An -v -tx1 ;;
    last)
      most=$((first * 65536)) # what is longer is shown in pieces of so many bytes
      [ "$most" -gt 1048576 ] || most=1048576
      head -c "$second" -- "$name" | tail -c "$most" | tail -n "$first" | wc -c
      ;;
  esac 2>/dev/null
  echo .
done
