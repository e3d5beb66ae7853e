# Restore without Python: unpack beside the target, compare with the list of sums, then move old files out and new ones in.
# The preamble defines nonce, echo_back (JSON), notes (the beginning of a JSON object), key, snapshot, bundle, bytes, mode, roots and, for each root N: name_N, folder_N,
# select_N.
cache="${XDG_CACHE_HOME:-$HOME/.cache}/memory-sidecar"
umask 022
escaped() { printf '%s' "$1" | sed 's/[\\"]/\\&/g' | tr '\n\t' '  '; }
answer() { printf '\nmemory-sidecar %s begin\n{"status":"%s",%s%s}\nmemory-sidecar %s end\n' "$nonce" "$1" "$echo_back" "$2" "$nonce"; }
stages=""
leave() { for stage in $stages; do rm -rf "$stage"; done; rm -f "$bundle"; }
fail() { leave; answer error ",\"error\":{\"code\":\"$1\",\"message\":\"$(escaped "$2")\",\"retryable\":${3:-false}}"; exit 0; }
[ "$(($(wc -c < "$bundle")))" = "$bytes" ] || fail upload-damaged "The upload did not arrive whole." true
unpacked="${bundle%.bundle}.unpacked"
stages="$unpacked"
mkdir -p "$unpacked" && gzip -dc "$bundle" | ( cd "$unpacked" && tar -xpf - ) || fail disk-full "The memory could not be unpacked."
checked=true
if command -v sha256sum >/dev/null 2>&1; then
    ( cd "$unpacked/new" && sha256sum -c --quiet ../sums >/dev/null 2>&1 || sha256sum -c ../sums >/dev/null 2>&1 ) || fail incomplete "Not every file arrived as it was."
else
    checked=false
fi
move() { # move every listed file from $1 to $2, as far as it goes
    while IFS= read -r file; do
        mkdir -p "$2/$(dirname "$file")" && mv "$1/$file" "$2/$file" || return 1
    done
}
undo() {
    for root in $done_roots; do
        eval "name=\$name_$root folder=\$folder_$root"
        ( cd "$unpacked/new/$name" 2>/dev/null && cat "$unpacked/$name.put" ) | while IFS= read -r file; do rm -f "$folder/$file"; done
        ( cat "$unpacked/$name.old" ) | while IFS= read -r file; do
            [ -e "$unpacked/old/$name/$file" ] || [ -L "$unpacked/old/$name/$file" ] || continue
            mkdir -p "$folder/$(dirname "$file")" && mv "$unpacked/old/$name/$file" "$folder/$file"
        done
    done
}
done_roots="" folders=""
for root in $roots; do
    eval "name=\$name_$root folder=\$folder_$root"
    [ -d "$unpacked/new/$name" ] || continue
    mkdir -p "$folder" || { undo; fail swap-failed "$folder cannot be made."; }
    : > "$unpacked/$name.old"
    if [ "$mode" = replace ]; then
        ( cd "$folder" && "select_$root" -print ) > "$unpacked/$name.old"
        # A database's old log would spoil the new database.
        ( cd "$unpacked/new/$name" && find . -type f -print ) | while IFS= read -r file; do
            for tail in -wal -shm -journal; do [ ! -e "$folder/$file$tail" ] || printf '%s\n' "$file$tail"; done
        done >> "$unpacked/$name.old"
        sort -u "$unpacked/$name.old" -o "$unpacked/$name.old"
    fi
    ( cd "$unpacked/new/$name" && find . ! -type d -print ) | while IFS= read -r file; do
        if [ "$mode" = seed ] && { [ -e "$folder/$file" ] || [ -L "$folder/$file" ]; }; then continue; fi
        printf '%s\n' "$file"
    done > "$unpacked/$name.put"
    done_roots="$done_roots $root"
    move "$folder" "$unpacked/old/$name" < "$unpacked/$name.old" || { undo; fail swap-failed "An old file in $folder could not be moved."; }
    move "$unpacked/new/$name" "$folder" < "$unpacked/$name.put" || { undo; fail swap-failed "A file could not be put into $folder."; }
    folders="$folders${folders:+,}\"$name\":\"$(escaped "$(cd "$folder" && pwd -P)")\""
done
files=$(cat "$unpacked"/*.put 2>/dev/null | wc -l)
mkdir -p "$cache/$key" && rm -f "$cache/$key"/index-* && printf '%s\n' "$snapshot" > "$cache/$key/lineage"
rm -f "$cache/$key/notes.new" && printf '%s,"roots":{%s}}' "$notes" "$folders" > "$cache/$key/notes.new" && mv -f "$cache/$key/notes.new" "$cache/$key/notes"
leave
answer complete ",\"files\":$((files)),\"checked\":$checked"
