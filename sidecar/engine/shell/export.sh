# Export without Python: copy the memory's files and databases into a folder, and tar it. A preamble generated for the request
# defines nonce, echo_back (JSON), turn_wait, key, snapshot, roots and, for each root N: name_N, layout_N, folder_N, databases_N, and the words by which look finds its files.
umask 077
cache="${XDG_CACHE_HOME:-$HOME/.cache}/memory-sidecar"
escaped() { printf '%s' "$1" | sed 's/[\\"]/\\&/g' | tr '\001-\037' ' '; }
work="$cache/work-sh-$nonce"
fail() { rm -rf "$work"; printf '\nmemory-sidecar %s begin\n{"status":"error",%s,"error":{"code":"%s","message":"%s","retryable":%s}}\nmemory-sidecar %s end\n' "$nonce" "$echo_back" "$1" "$(escaped "$2")" "${3:-false}" "$nonce"; exit 0; }
# <turn>
for tool in find gzip tar; do
    command -v "$tool" >/dev/null 2>&1 || fail no-tar "This sandbox has no python3, and no $tool either."
done
mkdir -p "$cache/$key" || exit 1
find "$cache" -maxdepth 1 -name 'work-sh-????????????????' -type d -mmin +15 -exec rm -rf {} + 2>/dev/null
: > "$cache/.exported"
mkdir -p "$work/stage" || exit 1
problems="$work/problems"
: > "$problems"
skipped="" skips=0 more=0 told="" warnings=0
# Rows for the names in a list, as many as a receipt lists; the others are counted.
skip() {
    while IFS= read -r line; do
        if [ "$skips" -ge 200 ]; then more=$((more + 1)); continue; fi
        skips=$((skips + 1))
        skipped="$skipped${skipped:+,}{\"path\":\"$name/$(escaped "${line#./}")\",\"reason\":\"$1\"}"
    done
}
warn() {
    [ "$warnings" -lt 20 ] || return 0
    warnings=$((warnings + 1))
    told="$told${told:+,}\"$(escaped "$1")\""
}
# list FILE WHAT TEST…: write down what look finds in the root.
list() {
    into="$work/$1" kind=$2
    shift 2
    ( cd "$folder" && look "$kind" "$root" "$@" -print0 ) > "$work/found" 2>"$problems" || fail unreadable "Not all of $folder can be read: $(head -n 1 "$problems")"
    names < "$work/found" > "$into"
}
# each COMMAND: run it with the names in a list, many at a time, for not every tar reads lists. All of them begin with "./".
each() {
    doing=$1
    set --
    while IFS= read -r line; do
        real "$line"
        set -- "$@" "$file"
        if [ "$#" -ge 100 ]; then "$doing" "$@" < /dev/null; set --; fi
    done
    [ "$#" = 0 ] || "$doing" "$@" < /dev/null
}
# What both halves of a copy complained of: when one fails, the other often says only that its input ended.
complaints() { head -n 1 "$work/packing"; head -n 1 "$work/unpacking"; }
# Modes are to be as they are, and only root's tar is sure to look past the mask. Nobody else gets into the folder.
bring() {
    ( cd "$folder" && tar $literal -cf - "$@" ) 2>"$work/packing" | ( cd "$work/stage/$name" && umask 0 && tar -xpf - ) 2>"$work/unpacking" || fail tar-failed "Not all of $folder was copied: $(complaints)"
    for file; do
        if there_is "$work/stage/$name/$file"; then continue; fi
        if ! there_is "$folder/$file"; then printf '%s\000' "$file" | names >> "$work/gone"; continue; fi
        [ -L "$folder/$file" ] || [ -r "$folder/$file" ] || fail unreadable "$name/${file#./} may not be read by this user."
        fail tar-failed "$name/${file#./} was not copied: $(complaints)"
    done
    [ ! -s "$work/packing" ] || [ -s "$work/gone" ] || warn "While $name was read: $(head -n 1 "$work/packing")"
}
# Folders come first, for not every tar gives one that is there another mode. They have their own, but are never closed to us.
bring_folders() {
    ( cd "$folder" && tar $literal --no-recursion -cf - "$@" ) 2>/dev/null | ( cd "$work/stage/$name" && umask 0 && tar -xpf -; chmod u+rwx "$@" ) 2>/dev/null
    ( cd "$work/stage/$name" && mkdir -p "$@" ) 2>"$problems" || fail disk-full "$(head -n 1 "$problems")"
}
# Two names of one file become two files: whoever unpacks what another made follows no links.
separate() {
    for file; do
        cp -p "$work/stage/$name/$file" "$work/single" && mv -f "$work/single" "$work/stage/$name/$file" || fail disk-full "$name/${file#./} could not be copied."
    done
}
# A database is told by its first bytes. The last of these is no text, and no shell can hold it.
magic=$(printf 'SQLite format 3\001')
is_database() { [ -f "$1" ] && [ ! -L "$1" ] && [ "$(head -c 16 "$1" 2>/dev/null | tr '\000' '\001')" = "$magic" ]; }
# Which of these files are databases. One look at them all comes first: mostly there is none among them.
seek() {
    case "$( ( cd "$folder" && head -c 16 "$@" ) 2>/dev/null | tr '\000' '\001')" in *"$magic"*) ;; *) return 0 ;; esac
    for file; do ! is_database "$folder/$file" || printf '%s\000' "$file"; done
}
listed() {
    while IFS= read -r one; do [ "$one" != "$1" ] || return 0; done < "$work/list"
    return 1
}
line_end='
'
# Whether this is the log of a database: that comes with it, or stays here with it. One that is no database as far as can be seen
# may still be one whose pages are all in the log: then both travel.
is_log() {
    stem=${1%-*}
    there_is "$folder/$stem" || return 1
    beside=$(printf '%s\000' "$stem" | names)
    case "$apart" in *"$line_end$beside$line_end"*) return 0 ;; esac
    ! listed "$beside" && [ ! -d "$folder/$stem" ] || return 1
    is_database "$folder/$stem" || [ ! -s "$folder/$stem" ] || [ ! -r "$folder/$stem" ]
}
# SQLite's own program copies to a name of ours, for it has its own quotes. What it cannot read is copied as it is.
copy_database() {
    [ -f "$folder/$1" ] || { printf '%s\000' "$1" | names >> "$work/gone"; return; }
    [ -r "$folder/$1" ] || fail unreadable "$name/${1#./} may not be read by this user."
    mkdir -p "$work/stage/$name/${1%/*}"
    if command -v sqlite3 >/dev/null 2>&1; then
        rm -f "$work/copied"
        if ( cd "$work" && sqlite3 "$folder/$1" ".timeout 10000" ".backup copied" < /dev/null ) >/dev/null 2>"$problems"; then
            mv -f "$work/copied" "$work/stage/$name/$1" || fail disk-full "$name/${1#./} could not be copied."
            rows="$rows${rows:+,}{\"path\":\"$name/$(escaped "${1#./}")\",\"method\":\"sqlite3\",\"check\":\"\"}"
            return
        fi
        case "$(cat "$problems")" in *locked* | *busy*) fail database-unreadable "$name/${1#./}: $(head -n 1 "$problems")" true ;; esac
    fi
    for tail in "" -wal -journal; do
        [ ! -f "$folder/$1$tail" ] || cp -p "$folder/$1$tail" "$work/stage/$name/$1$tail" || fail disk-full "$name/${1#./} could not be copied."
    done
}
# Some tars take a backslash in a name for a quote unless they are told not to.
literal=--no-unquote
tar "$literal" -cf /dev/null /dev/null 2>/dev/null || literal=""
found="" folders=""
rows=""
seen=""
for root in $roots; do
    eval "name=\$name_$root layout=\$layout_$root folder=\$folder_$root databases=\$databases_$root"
    [ -d "$folder" ] || continue
    case "$folder" in /*) ;; *) folder="$PWD/$folder" ;; esac
    case "$seen" in *"|${name%-[0-9]*}:$folder|"*) continue ;; esac
    seen="$seen|${name%-[0-9]*}:$folder|"
    mkdir -p "$work/stage/$name"
    list list select ! -path "*$unit*"
    list folders folders ! -path "*$unit*"
    list left select -path "*$unit*" && skip "its name has a character that cannot be restored without Python" < "$work/left"
    list left secret && skip secret < "$work/left"
    list left never && skip "never exported" < "$work/left"
    list left others && skip "not a file, folder or link" < "$work/left"
    list left leads && skip "a link, not a folder" < "$work/left"
    : > "$work/databases"
    ( cd "$folder" && for pattern in $databases; do
        if [ -L "$pattern" ] || [ -f "$pattern" ]; then printf './%s\000' "$pattern"; fi
    done ) | names | while IFS= read -r line; do
        real "$line"
        if [ -L "$folder/$file" ]; then printf '%s\n' "$line" >> "$work/list"; else printf '%s\n' "$line" >> "$work/databases"; fi
    done
    # There may be databases that nobody has told of.
    each seek < "$work/list" | names >> "$work/databases"
    sort -u "$work/databases" -o "$work/databases"
    apart=$line_end
    while IFS= read -r line; do apart="$apart$line$line_end"; done < "$work/databases"
    while IFS= read -r line; do
        case "$apart" in *"$line_end$line$line_end"*) continue ;; esac
        case "$line" in *-wal | *-shm | *-journal) real "$line"; ! is_log "$file" || continue ;; esac
        printf '%s\n' "$line"
    done < "$work/list" > "$work/files"
    mv -f "$work/files" "$work/list"
    : > "$work/gone"
    each bring_folders < "$work/folders"
    while IFS= read -r line; do
        real "$line"
        copy_database "$file"
    done < "$work/databases"
    each bring < "$work/list"
    skip "it vanished while it was read" < "$work/gone"
    ( cd "$work/stage/$name" && find . -type f -links +1 -print0 ) | names > "$work/linked"
    each separate < "$work/linked"
    [ -n "$(ls -A "$work/stage/$name")" ] || continue
    here=$(CDPATH='' cd "$folder" && pwd)
    folders="$folders${folders:+,}\"$name\":\"$(escaped "$(CDPATH='' cd "$folder" && pwd -P)")\""
    found="$found${found:+,}{\"name\":\"$name\",\"layout\":\"$layout\",\"hint\":\"$(escaped "$here")\"}"
done
{ ( cd "$work/stage" && tar -cf - . ) 2>"$problems" || : > "$work/untarred"; } | gzip -1 > "$work/bundle" 2>"$work/unpacking" || fail disk-full "$(cat "$work/unpacking")"
[ ! -e "$work/untarred" ] || fail tar-failed "$(head -n 1 "$problems")"
rm -rf "$work/stage"
# A sandbox that was restored to be read notes its snapshots elsewhere, and one that has a part of the memory below its patterns.
part=""
if [ -f "$cache/$key/read-lineage" ]; then history=read-lineage reader=true
elif [ -f "$cache/$key/lineage" ] || [ ! -f "$cache/$key/part-lineage" ]; then history=lineage reader=false
else history=part-lineage reader=true part="\"$(escaped "$(head -n 1 "$cache/$key/part-lineage")")\""; fi
lineage=$(sed -n '/^[0-9A-Za-z-]\{1,64\}$/p' "$cache/$key/$history" 2>/dev/null | sed -n '1!G;h;$p' | head -n 100 | sed 's/.*/"&"/' | tr '\n' ',' | sed 's/,$//')
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
printf '\nmemory-sidecar %s begin\n{"status":"tarball",%s,"home":"%s","user":"%s","lineage":[%s],"reader":%s,"part":[%s],"noted":[%s],"folders":{%s},"roots":[%s],"databases":[%s],"skipped":[%s],"skipped_more":%d,"warnings":[%s],"bundle":{"path":"%s","bytes":%d,"sha256":"%s"}}\nmemory-sidecar %s end\n' \
    "$nonce" "$echo_back" "$(escaped "$HOME")" "$(escaped "$(id -un 2>/dev/null || printf %s "${USER-}")")" "$lineage" "$reader" "$part" "$noted" "$folders" "$found" "$rows" "$skipped" "$more" "$told" "$(escaped "$work/bundle")" "$(($(wc -c < "$work/bundle")))" "$sum" "$nonce"
