/* Names: LOOKUP, CREATE, TMPFILE, MKNOD, MKDIR, SYMLINK, LINK, READLINK, UNLINK, RMDIR, RENAME.
 *
 * The backing filesystem checks permissions for each change, as the caller: see call_as.c. Python's parts are the link
 * to the caller's drop folder and renames into a drop folder; they are detected before anything is changed. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>

static const int ANEW = O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, NOT_BELOW = O_DIRECT | O_TRUNC | O_PATH | O_TMPFILE;
static const uint64_t ROOT = 1;
enum { TARGET_BYTES = 4096 };

/* Open a directory in which a name may be changed. Returns 0 or a negative errno. */
static int open_changeable(Request *request, uint64_t nodeid, const char *name, Place *place) {
    int result = open_place(request, nodeid, name, place);
    if (result == 0 && is_drop_name(request->core, place->node, name)) {
        close_place(place);
        result = -EPERM;
    }
    return result;
}

/* Return the capability for what the mode and ACL of an open inode restrict. */
static Need by_mode_of(const Request *request, int fd) {
    struct stat found;
    if (!request->core->acts_as_others || fstat(fd, &found) < 0)
        return (Need){DAC_OVERRIDE, UINT32_MAX, ANY_GROUP};
    return (Need){DAC_OVERRIDE, found.st_uid, found.st_gid};
}

/* Return the capability for what only an inode's owner may do with its names: remove one in a sticky directory, or link
 * it. */
static Need by_owner(const Seen *seen) { return (Need){FOWNER, seen->uid, seen->gid}; }

/* LOOKUP and READLINK. */

/* Put the entry of an inode that was stat'ed; the kernel gets one more reference. Returns its size. */
static int put_found(Request *request, const Place *place, const Seen *seen) {
    Core *core = request->core;
    Node *node = learn(request, place, seen);
    counted(node, true);
    note_stored(request, node, place->node, false);
    double name_s = name_lifetime(request, place);
    double believed_s = put_entry_for(request, request->answer, node, seen, !is_unsteady(node), name_s);
    if (__atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED))
        node->told_until_s = now_ns() / 1e9 + believed_s;
    node_put(node);
    return ENTRY_BYTES;
}

/* Return whether Python replies to a LOOKUP: of the link to the caller's drop folder; in a drop folder, where the
 * caller still finds what it has just moved there; of the top's own name (mount/life/root_inode.py). */
static bool is_pythons_lookup(const Request *request) {
    Tables *t = request->core->tables;
    const Node *directory = node_of(t, request->nodeid);
    if (request->is_pythons || directory == NULL)
        return false;
    bool is_for_top = request->nodeid == ROOT && directory->nodeid != ROOT;
    return is_for_top || is_drop_name(request->core, directory, request->payload) || is_drop_folder(t, directory);
}

/* Stat a name; once more if another request has changed a name in its directory meanwhile, as the result may mix two
 * inodes. Returns 0 or an errno. */
static int find(Request *request, const Place *place, Seen *seen) {
    const Core *core = request->core;
    for (Look *stat = looking(request);; stat = peek) {
        calls_begin(request);
        Timed timed = time_begin(core);
        int error = request->held < 0 ? stat(place->fd->number, place->name, core->statx_flags, seen)
                                      : identify(request->held, "", core->statx_flags, seen);
        time_end(core, &timed, 1);
        if (!error)
            see_device(request, seen->dev);
        calls_end(request);
        tell_took(request, &timed, 1);
        if (stat == peek || !is_changed(request, place->node))
            return error;
    }
}

int do_lookup(Request *request) {
    Place place;
    Seen seen;
    if (is_pythons_lookup(request))
        return NOT_OURS;
    int result = open_place(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    see_fickle(request, &place);
    int error = find(request, &place, &seen);
    if (!error)
        result = put_found(request, &place, &seen);
    else if (error == ENOENT && !request->is_fickle)
        result = put_missing(request, name_lifetime(request, &place));
    else
        result = -error;
    close_place(&place);
    return result;
}

int do_readlink(Request *request) {
    Known known;
    Seen seen;
    char target[TARGET_BYTES];
    int held;
    ssize_t n = -1;
    int result = open_known(request, request->nodeid, &known);
    if (result < 0)
        return result; /* NOT_OURS: a link to a drop folder */
    calls_begin(request);
    int error = reach(request->core, &known, &seen, &held);
    if (!error) {
        n = readlinkat(held < 0 ? known.fd->number : held, "", target, sizeof target);
        error = n < 0 ? errno : 0;
    }
    if (held >= 0)
        close(held);
    calls_end(request);
    if (!error) { /* its atime has changed */
        renew(request->core->tables, known.node);
        forget_cached(request, known.node, NULL);
        memcpy(request->answer, target, (size_t)n);
    }
    close_known(&known);
    return error ? -error : (int)n;
}

/* New names. */

/* Prepare to create an inode as the caller: owner, group, ACLs, quota. mode: of a file, which keeps its set-group-ID
 * bit if the caller may set that of the directory's group; 0 for others */
static Acting making_in(const Request *request, const Place *place, uint32_t mode, uint32_t with_umask) {
    Seen directory;
    Need need = by_mode_of(request, place->fd->number);
    Acting acting = acting_by(request, &need, 1);
    acting.actor.makes = true, acting.actor.umask = with_umask;
    if (mode & S_ISGID && !look(place->fd->number, "", request->core->statx_flags, &directory) &&
        directory.mode & S_ISGID && keeps_group(request, &directory))
        acting.actor.gid = directory.gid;
    return acting;
}

/* A name in a directory was changed. */
static void note_named(Request *request, const Place *place) {
    changed(request->core->tables, place->node);
    forget_cached(request, NULL, place);
}

/* Put the entry of a new inode, with n bytes that follow; or prepare that for when the node has its own number.
 * is_steady: before it was opened. Returns a result of an operation. */
static int put_made(Request *request, const Place *place, Node *node, const Seen *seen, bool is_steady, int n) {
    Tables *t = request->core->tables;
    note_stored(request, node, place->node, false);
    renumber(t, node);
    put_entry_for(request, request->answer, node, seen, is_steady, name_lifetime(request, place));
    if (!lacks_its_number(t, node))
        return ENTRY_BYTES + n;
    request->made = node_take(node);
    request->n_made = ENTRY_BYTES + n;
    return LATER;
}

/* CREATE; and TMPFILE, which makes a file without a name. LINK may give it one while it is open. */
static int create(Request *request, bool is_named) {
    Core *core = request->core;
    Tables *t = core->tables;
    uint32_t in[4]; /* struct fuse_create_in: flags, mode, umask, open_flags */
    Place place;
    Seen seen;
    Opening opening = {0};
    int fd = -1, error;
    memcpy(in, request->own, sizeof in);
    int result = open_changeable(request, request->nodeid, is_named ? request->payload : "", &place);
    if (result < 0)
        return result;
    if (!make_room(t, request->uid)) {
        close_place(&place);
        return -EMFILE;
    }
    see_fickle(request, &place);
    request->is_fickle |= !is_named;
    int flags = ((int)in[0] & ~NOT_BELOW) | (is_named ? ANEW : O_TMPFILE | O_CLOEXEC);
    changes_begin(request, place.node, place.node);
    Acting acting = making_in(request, &place, in[1], in[2]);
    while (acts(&acting, &error)) {
        fd = openat(place.fd->number, is_named ? place.name : ".", flags, in[1] & 07777);
        error = fd < 0 ? errno : 0;
    }
    bool is_made = fd >= 0;
    if (!error)
        error = identify(fd, "", core->statx_flags, &seen);
    if (!error) {
        see_device(request, seen.dev);
        opening = open_backing(request, fd, &seen);
        if (in[0] & O_APPEND)
            write_anywhere(fd);
    } else if (is_made)
        close(fd);
    changes_end(request, place.node, place.node);
    if (is_made && is_named)
        note_named(request, &place);
    if (!is_made)
        mistake(request, place.node, error);
    if (!error) {
        Node *node = learn(request, &place, &seen);
        if (!is_named)
            take_away_name(t, node, place.node, place.name);
        bool is_steady = !is_unsteady(node); /* the open handle may change that */
        counted(node, false);
        put_handle(request, node, fd, in[0] | O_CREAT, true, &opening, request->answer + ENTRY_BYTES);
        result = put_made(request, &place, node, &seen, is_steady, OPEN_BYTES);
        node_put(node);
    } else
        /* EEXIST: created meanwhile. After ESTALE the kernel looks it up, and checks permissions, again. */
        result = error == EEXIST && is_named && !(in[0] & O_EXCL) ? -ESTALE : -error;
    close_place(&place);
    return result;
}

int do_create(Request *request) { return create(request, true); }

int do_tmpfile(Request *request) {
    /* Some FUSE filesystems lose such a file when it is closed, even if it was linked. */
    return request->core->statx_flags & WITHOUT_HANDLES ? -EOPNOTSUPP : create(request, false);
}

/* An inode to be made: with a target a symbolic link, else by its mode. */
typedef struct {
    uint32_t mode, rdev, umask;
    const char *target;
} Made;

static int make_at(const Made *made, const Place *place) {
    int fd = place->fd->number;
    int done = made->target != NULL  ? symlinkat(made->target, fd, place->name)
               : S_ISDIR(made->mode) ? mkdirat(fd, place->name, made->mode & 07777)
                                     : mknodat(fd, place->name, made->mode, made->rdev);
    return done < 0 ? errno : 0;
}

static int make(Request *request, const Made *made) {
    Core *core = request->core;
    Place place;
    Seen seen;
    int error;
    int result = open_changeable(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    see_fickle(request, &place);
    changes_begin(request, place.node, place.node);
    Acting acting = making_in(request, &place, S_ISDIR(made->mode) ? 0 : made->mode, made->umask);
    while (acts(&acting, &error))
        error = make_at(made, &place);
    bool is_made = !error;
    if (is_made)
        error = peek(place.fd->number, place.name, core->statx_flags, &seen);
    if (!error)
        see_device(request, seen.dev);
    changes_end(request, place.node, place.node);
    if (is_made)
        note_named(request, &place);
    else
        mistake(request, place.node, error);
    if (!error) {
        Node *node = learn(request, &place, &seen);
        counted(node, true);
        result = put_made(request, &place, node, &seen, !is_unsteady(node), 0);
        node_put(node);
    }
    close_place(&place);
    return error ? -error : result;
}

int do_mkdir(Request *request) {
    uint32_t in[2]; /* struct fuse_mkdir_in: mode, umask */
    memcpy(in, request->own, sizeof in);
    return make(request, &(Made){.mode = (in[0] & 07777) | S_IFDIR, .umask = in[1]});
}

int do_mknod(Request *request) {
    uint32_t in[4]; /* struct fuse_mknod_in: mode, rdev, umask, padding */
    memcpy(in, request->own, sizeof in);
    return make(request, &(Made){.mode = in[0], .rdev = in[1], .umask = in[2]});
}

int do_symlink(Request *request) {
    return make(request, &(Made){.target = request->payload + strlen(request->payload) + 1});
}

int do_link(Request *request) {
    Core *core = request->core;
    uint64_t nodeid;
    Place place;
    Known known;
    Seen seen;
    char path[32];
    int held;
    memcpy(&nodeid, request->own, sizeof nodeid);
    int result = open_changeable(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    result = open_known(request, nodeid, &known);
    if (result < 0) {
        close_place(&place);
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    }
    see_fickle(request, &place);
    changes_begin(request, place.node, known.node);
    int error = reach(request->core, &known, &seen, &held);
    bool is_made = false;
    if (!error) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", held < 0 ? known.fd->number : held);
        /* The file's mode counts, too: fs.protected_hardlinks. */
        Need needs[] = {by_mode_of(request, place.fd->number), by_mode(&seen), by_owner(&seen)};
        Acting acting = acting_by(request, needs, 3);
        while (acts(&acting, &error))
            error = linkat(AT_FDCWD, path, place.fd->number, place.name, AT_SYMLINK_FOLLOW) < 0 ? errno : 0;
        is_made = !error;
    }
    if (held >= 0)
        close(held);
    if (is_made)
        error = peek(place.fd->number, place.name, core->statx_flags, &seen);
    if (!error)
        see_device(request, seen.dev);
    changes_end(request, place.node, known.node);
    if (is_made) {
        note_named(request, &place);
        forget_cached(request, known.node, NULL);
        known.node->told_until_s = 0; /* attributes of a file with several names have a shorter timeout */
    } else {
        mistake(request, place.node, error);
        mistake(request, known.node, error);
    }
    if (!error)
        result = put_found(request, &place, &seen);
    close_known(&known);
    close_place(&place);
    return error ? -error : result;
}

/* UNLINK, RMDIR and RENAME. */

static int remove_name(Request *request, int flags) {
    Core *core = request->core;
    Place place;
    Seen seen;
    int result = open_changeable(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    changes_begin(request, place.node, place.node);
    int error = looking(request)(place.fd->number, place.name, core->statx_flags, &seen);
    if (!error) {
        Need needs[] = {by_mode_of(request, place.fd->number), by_owner(&seen)};
        Acting acting = acting_by(request, needs, 2);
        while (acts(&acting, &error))
            error = unlinkat(place.fd->number, place.name, flags) < 0 ? errno : 0;
    }
    changes_end(request, place.node, place.node);
    if (!error) {
        note_named(request, &place);
        lose(request, &seen, &place);
    } else
        mistake(request, place.node, error);
    close_place(&place);
    return -error;
}

int do_unlink(Request *request) { return remove_name(request, 0); }
int do_rmdir(Request *request) { return remove_name(request, AT_REMOVEDIR); }

/* Return whether two names belong to one inode. */
static bool are_one(const Seen *seen, const Seen *other) {
    Source source = source_of(seen), than = source_of(other);
    return source.dev == than.dev && source.n_handle == than.n_handle &&
           (source.n_handle ? !memcmp(source.handle, than.handle, source.n_handle)
                            : source.ino == than.ino && source.btime_ns == than.btime_ns);
}

/* Update the tables after a rename. no_other: the new name did not exist */
static void note_renamed(Request *request, const Place *old, const Place *new, const Seen *seen, const Seen *other,
                         bool no_other, bool is_exchanged) {
    Tables *t = request->core->tables;
    changed(t, old->node);
    if (new->node != old->node)
        changed(t, new->node);
    if (zone_of(t, old->node) == TRASH || (is_exchanged && zone_of(t, new->node) == TRASH))
        come_back(request);
    forget_cached(request, NULL, old);
    forget_cached(request, NULL, new);
    if (!no_other && are_one(seen, other))
        return; /* both names remain */
    if (is_exchanged)
        move(request, other, new, old);
    else if (!no_other)
        lose(request, other, new);
    move(request, seen, old, new);
}

/* Rename with flags of renameat2(2), which the backing filesystem obeys or refuses. */
static int change_name(Request *request, uint64_t new_parent, uint32_t flags) {
    Core *core = request->core;
    Tables *t = core->tables;
    Place old, new;
    Seen seen, other;
    const char *second = request->payload + strlen(request->payload) + 1;
    const Node *to = node_of(t, new_parent);
    if (!request->is_pythons && to != NULL && !(flags & ~(uint32_t)RENAME_NOREPLACE) && is_drop_folder(t, to))
        return NOT_OURS; /* Python makes an orphan of it */
    int result = open_changeable(request, request->nodeid, request->payload, &old);
    if (result < 0)
        return result;
    result = open_changeable(request, new_parent, second, &new);
    if (result < 0) {
        close_place(&old);
        return result;
    }
    changes_begin(request, old.node, new.node);
    int error = looking(request)(old.fd->number, old.name, core->statx_flags, &seen);
    int no_other = looking(request)(new.fd->number, new.name, core->statx_flags, &other);
    if (!error && no_other != ENOENT)
        error = no_other;
    if (!error) {
        Need needs[N_NEEDS_MAX] = {by_mode_of(request, old.fd->number), by_owner(&seen)};
        int n = 2;
        if (new.node != old.node)
            needs[n++] = by_mode_of(request, new.fd->number);
        if (!no_other)
            needs[n++] = by_owner(&other);
        if (old.node != new.node && S_ISDIR(seen.mode)) /* its `..` changes */
            needs[n++] = by_mode(&seen);
        if (old.node != new.node && !no_other && S_ISDIR(other.mode))
            needs[n++] = by_mode(&other);
        Acting acting = acting_by(request, needs, n);
        while (acts(&acting, &error))
            error = renameat2(old.fd->number, old.name, new.fd->number, new.name, flags) < 0 ? errno : 0;
    }
    changes_end(request, old.node, new.node);
    if (!error)
        note_renamed(request, &old, &new, &seen, &other, no_other, flags & RENAME_EXCHANGE);
    else {
        mistake(request, old.node, error);
        if (new.node != old.node)
            mistake(request, new.node, error);
    }
    close_place(&old);
    close_place(&new);
    return -error;
}

int do_rename(Request *request) {
    uint64_t new_parent;
    memcpy(&new_parent, request->own, sizeof new_parent);
    return change_name(request, new_parent, 0);
}

int do_rename2(Request *request) {
    struct {
        uint64_t new_parent;
        uint32_t flags, padding;
    } in;
    memcpy(&in, request->own, sizeof in);
    return change_name(request, in.new_parent, in.flags);
}
