# Export without Python: copy the memory's files and databases into a folder, and tar it. A preamble generated for the request
# defines nonce, echo_back (JSON), turn_wait, key, snapshot, roots and, for each root N: name_N, layout_N, folder_N, databases_N, select_N, never_N, secret_N.
umask 077
cache="${XDG_CACHE_HOME:-$HOME/.cache}/memory-sidecar"
escaped() { printf '%s' "$1" | sed 's/[\\"]/\\&/g' | tr '\001-\037' ' '; }
work="$cache/work-sh-$nonce"
fail() { rm -rf "$work"; printf '\nmemory-sidecar %s begin\n{"status":"error",%s,"error":{"code":"%s","message":"%s","retryable":%s}}\nmemory-sidecar %s end\n' "$nonce" "$echo_back" "$1" "$(escaped "$2")" "${3:-false}" "$nonce"; exit 0; }
# <turn>
mkdir -p "$cache/$key" || exit 1
find "$cache" -maxdepth 1 -name 'work-sh-????????????????' -type d -mmin +15 -exec rm -rf {} + 2>/dev/null
: > "$cache/.exported"
mkdir -p "$work/stage" || exit 1
problems="$work/problems"
: > "$problems"
# Rows for names that come with NUL after each, as many as a receipt lists; the others are counted.
skip() {
    tr '\n\000' ' \n' > "$work/skipped"
    while IFS= read -r file; do
        if [ "$skips" -ge 200 ]; then more=$((more + 1)); continue; fi
        skips=$((skips + 1))
        skipped="$skipped${skipped:+,}{\"path\":\"$name/$(escaped "${file#./}")\",\"reason\":\"$1\"}"
    done < "$work/skipped"
}
skipped="" skips=0 more=0
# Names that a list of lines cannot carry: with a newline, or, where tar takes it for a quote, with a backslash.
if tar --null -cf /dev/null -T /dev/null 2>/dev/null; then
    listed=true odd='*[\\
]*'
else
    listed=false odd='*
*'
fi
command -v tar >/dev/null 2>&1 && command -v gzip >/dev/null 2>&1 || fail no-tar "This sandbox has no python3, and no tar and gzip either."
found="" folders=""
rows=""
seen=""
for root in $roots; do
    eval "name=\$name_$root layout=\$layout_$root folder=\$folder_$root databases=\$databases_$root"
    [ -d "$folder" ] || continue
    case "$seen" in *"|$layout:$folder|"*) continue ;; esac
    seen="$seen|$layout:$folder|"
    mkdir -p "$work/stage/$name"
    ( cd "$folder" && "select_$root" ! -path "$odd" -print ) > "$work/list" || fail unreadable "Not all of $folder can be read."
    ( cd "$folder" && "select_$root" -path "$odd" -print0 ) > "$work/odd" || fail unreadable "Not all of $folder can be read."
    ( cd "$folder" && "secret_$root" -print0 ) > "$work/left" && skip secret < "$work/left"
    ( cd "$folder" && "never_$root" -print0 ) > "$work/left" && skip "never exported" < "$work/left"
    for database in $(cd "$folder" && for pattern in $databases; do [ ! -f "$pattern" ] || printf '%s\n' "$pattern"; done); do
        mkdir -p "$work/stage/$name/$(dirname "$database")"
        if command -v sqlite3 >/dev/null 2>&1; then
            sqlite3 "$folder/$database" ".timeout 10000" ".backup '$work/stage/$name/$database'" >/dev/null 2>"$problems" || fail database-unreadable "$(cat "$problems")"
            method=sqlite3
        else
            for tail in "" -wal -journal; do
                [ ! -f "$folder/$database$tail" ] || cp -p "$folder/$database$tail" "$work/stage/$name/$database$tail" || fail disk-full "The database could not be copied."
            done
            method=copied
        fi
        rows="$rows${rows:+,}{\"path\":\"$name/$(escaped "$database")\",\"method\":\"$method\",\"check\":\"\"}"
    done
    if [ -s "$work/list" ]; then
        ( cd "$folder" && tar -cf - -T "$work/list" 2>"$problems" ) | ( cd "$work/stage/$name" && tar -xf - 2>>"$problems" ) || fail tar-failed "$(tail -n 1 "$problems")"
        missing=$(cd "$work/stage/$name" && while IFS= read -r file; do [ -e "$file" ] || [ -L "$file" ] || printf '%s\n' "$file"; done < "$work/list" | head -n 1)
        [ -z "$missing" ] || fail tar-failed "$missing was not copied: $(tail -n 1 "$problems")"
    fi
    if [ -s "$work/odd" ]; then
        if [ "$listed" = true ]; then
            ( cd "$folder" && tar --null -cf "$work/odd.tar" -T "$work/odd" && cd "$work/stage/$name" && tar -xf "$work/odd.tar" ) 2>"$problems" || fail tar-failed "$(tail -n 1 "$problems")"
            rm -f "$work/odd.tar"
        else
            skip "its name has a newline, which the tar of this sandbox cannot take" < "$work/odd"
        fi
    fi
    [ -n "$(ls -A "$work/stage/$name")" ] || continue
    here=$(CDPATH='' cd "$folder" && pwd)
    folders="$folders${folders:+,}\"$name\":\"$(escaped "$(CDPATH='' cd "$folder" && pwd -P)")\""
    found="$found${found:+,}{\"name\":\"$name\",\"layout\":\"$layout\",\"hint\":\"$(escaped "$here")\"}"
done
( cd "$work/stage" && tar -cf - . ) 2>"$problems" | gzip -1 > "$work/bundle" || fail disk-full "$(tail -n 1 "$problems")"
rm -rf "$work/stage"
# A sandbox that was restored to be read notes its snapshots elsewhere.
if [ -f "$cache/$key/read-lineage" ]; then history=read-lineage reader=true; else history=lineage reader=false; fi
lineage=$(sed -n '1!G;h;$p' "$cache/$key/$history" 2>/dev/null | head -n 100 | sed 's/.*/"&"/' | tr '\n' ',' | sed 's/,$//')
printf '%s\n' "$snapshot" >> "$cache/$key/$history"
# What was noted of the memories here, as it is: the sidecar looks whether it makes sense, and has new notes written.
noted="" notes=0
for file in "$cache"/*/notes; do
    if [ -f "$file" ] && [ ! -L "$file" ] && [ "$(($(wc -c < "$file")))" -le 65536 ] && [ "$notes" -lt 50 ]; then
        notes=$((notes + 1))
        noted="$noted${noted:+,}\"$(escaped "$(cat "$file")")\""
    fi
done
rm -f "$cache/$key"/index-*
printf '%s' "$snapshot" > "$work/keep"
sum=$( (sha256sum "$work/bundle" 2>/dev/null || shasum -a 256 "$work/bundle" 2>/dev/null) | cut -d' ' -f1)
printf '\nmemory-sidecar %s begin\n{"status":"tarball",%s,"home":"%s","lineage":[%s],"reader":%s,"noted":[%s],"folders":{%s},"roots":[%s],"databases":[%s],"skipped":[%s],"skipped_more":%d,"bundle":{"path":"%s","bytes":%d,"sha256":"%s"}}\nmemory-sidecar %s end\n' \
    "$nonce" "$echo_back" "$(escaped "$HOME")" "$lineage" "$reader" "$noted" "$folders" "$found" "$rows" "$skipped" "$more" "$(escaped "$work/bundle")" "$(($(wc -c < "$work/bundle")))" "$sum" "$nonce"
