# The bash kernel: keeps variables, functions and the working directory between calls. Requests come on descriptor 4:
# a line "ID BYTES BYTES", then so many bytes of declarations and of code. What the code prints goes to the host as it
# is; where a call begins and ends, a record is written to both streams (6 and 7). Bash 4 or newer.
__rf_run() {
  eval "$__rf_declarations"
  eval "$__rf_code" 4<&- 5<&- 6>&- 7>&-
}
__rf_read() { # exactly $1 bytes into __rf_got
  local LC_ALL=C
  __rf_got=
  [ "$1" -eq 0 ] || IFS= read -r -N "$1" -u 4 __rf_got
}
__rf_mark() {
  printf '\036ringfence %s\036' "$1" >&6
  printf '\036ringfence %s\036' "$1" >&7
}
trap '' INT
__rf_mark "ready - 0"
while IFS=' ' read -r -u 4 __rf_id __rf_first __rf_second; do
  __rf_read "$__rf_first" || exit 0
  __rf_declarations=$__rf_got
  __rf_read "$__rf_second" || exit 0
  __rf_code=$__rf_got
  __rf_mark "begin $__rf_id 0"
  trap 'return 130' INT
  __rf_run <&5
  __rf_status=$?
  trap '' INT
  __rf_mark "end $__rf_id $__rf_status"
done
exit 0
