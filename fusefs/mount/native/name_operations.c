/* Names: LOOKUP, CREATE, TMPFILE, MKNOD, MKDIR, SYMLINK, LINK, READLINK, UNLINK, RMDIR, RENAME.
 *
 * The backing filesystem checks permissions for each change, as the caller: see call_as.c. Python's parts are the
 * link to the caller's drop directory and renames into a drop directory; they are detected before anything is
 * changed. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>

static const int CREATE_NEW_FLAGS = O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                 UNSUPPORTED_FLAGS = O_DIRECT | O_TRUNC | O_PATH | O_TMPFILE;
static const uint64_t ROOT = 1;
enum { TARGET_BYTES = 4096 };

/* Open a directory in which a name may be changed. Returns 0 or a negative errno. */
static int open_changeable(Request *request, uint64_t nodeid, const char *name, Place *place) {
    int result = open_place(request, nodeid, name, place);
    if (result == 0 && is_drop_link_name(request->core, place->node, name)) {
        close_place(place);
        result = -EPERM;
    }
    return result;
}

/* Return the capability for actions that the mode and ACL of an open inode restrict. */
static NeededCapability override_of_mode_of(const Request *request, int fd) {
    struct stat found;
    if (!request->core->acts_as_others || fstat(fd, &found) < 0)
        return (NeededCapability){DAC_OVERRIDE, UINT32_MAX, ANY_GROUP};
    return (NeededCapability){DAC_OVERRIDE, found.st_uid, found.st_gid};
}

/* Return the capability for actions on names that only the inode's owner may do: remove one in a sticky directory, or
 * link the inode. */
static NeededCapability owner_of_name(const Stat *st) { return (NeededCapability){FOWNER, st->uid, st->gid}; }

/* LOOKUP and READLINK. */

/* Put the entry of an inode that was stat'ed; the kernel gets one more reference. Returns its size. */
static int put_found_entry(Request *request, const Place *place, const Stat *st) {
    Core *core = request->core;
    Node *node = node_for_name(request, place, st);
    count_reference(node, true);
    note_stored(request, node, place->node, false);
    double name_s = entry_timeout(request, place);
    double cached_s = put_entry_for(request, request->reply_body, node, st, !is_unsteady(node), name_s);
    if (__atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED))
        node->cached_until_s = now_ns() / 1e9 + cached_s;
    node_put(node);
    return ENTRY_BYTES;
}

/* Return whether Python replies to a LOOKUP: of the link to the caller's drop directory; in a drop directory, where
 * the caller still finds a tree that it has just moved there; of the top's own name (mount/life/root_inode.py). */
static bool is_pythons_lookup(const Request *request) {
    Tables *t = request->core->tables;
    const Node *directory = node_of(t, request->nodeid);
    if (request->is_from_python || directory == NULL)
        return false;
    bool is_for_top = request->nodeid == ROOT && directory->nodeid != ROOT;
    return is_for_top || is_drop_link_name(request->core, directory, request->payload) ||
           is_drop_directory(t, directory);
}

/* Stat a name; once more if another request has changed a name in its directory meanwhile, as the result may mix two
 * inodes. Returns 0 or an errno. */
static int stat_in_directory(Request *request, const Place *place, Stat *st) {
    const Core *core = request->core;
    for (StatFunction *stat = stat_function(request);; stat = stat_opened) {
        calls_begin(request);
        StatTimer timer = start_stat_timer(core);
        int error = request->inode_fd < 0 ? stat(place->fd->number, place->name, core->statx_flags, st)
                                          : stat_with_handle(request->inode_fd, "", core->statx_flags, st);
        stop_stat_timer(core, &timer, 1);
        if (!error)
            check_device(request, st->dev);
        calls_end(request);
        report_stat_time(request, &timer, 1);
        if (stat == stat_opened || !is_changed(request, place->node))
            return error;
    }
}

int do_lookup(Request *request) {
    Place place;
    Stat st;
    if (is_pythons_lookup(request))
        return NOT_OURS;
    int result = open_place(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    check_name_cacheable(request, &place);
    int error = stat_in_directory(request, &place, &st);
    if (!error)
        result = put_found_entry(request, &place, &st);
    else if (error == ENOENT && !request->is_uncacheable)
        result = put_negative_entry(request, entry_timeout(request, &place));
    else
        result = -error;
    close_place(&place);
    return result;
}

int do_readlink(Request *request) {
    Route route;
    Stat st;
    char target[TARGET_BYTES];
    int held;
    ssize_t n = -1;
    int result = open_route(request, request->nodeid, &route);
    if (result < 0)
        return result; /* NOT_OURS: a link to a drop directory */
    calls_begin(request);
    int error = reach_inode(request->core, &route, &st, &held);
    if (!error) {
        n = readlinkat(held < 0 ? route.fd->number : held, "", target, sizeof target);
        error = n < 0 ? errno : 0;
    }
    if (held >= 0)
        close(held);
    calls_end(request);
    if (!error) { /* its atime has changed */
        invalidate_attributes(request->core->tables, route.node);
        note_cached_change(request, route.node, NULL);
        memcpy(request->reply_body, target, (size_t)n);
    }
    close_route(&route);
    return error ? -error : (int)n;
}

/* New names. */

/* Prepare to create an inode as the caller, who determines its owner, group, ACLs and quota. mode: of a file; it keeps
 * its set-group-ID bit if the caller may set that bit for the directory's group; 0: not a file */
static CallerAttempts attempt_to_create(const Request *request, const Place *place, uint32_t mode,
                                        uint32_t with_umask) {
    Stat directory;
    NeededCapability need = override_of_mode_of(request, place->fd->number);
    CallerAttempts attempts = attempt_with_needs(request, &need, 1);
    attempts.identity.is_creating = true, attempts.identity.umask = with_umask;
    if (mode & S_ISGID && !stat_at(place->fd->number, "", request->core->statx_flags, &directory) &&
        directory.mode & S_ISGID && keeps_group(request, &directory))
        attempts.identity.gid = directory.gid;
    return attempts;
}

/* Note that a name in a directory was changed. */
static void note_name_change(Request *request, const Place *place) {
    note_directory_change(request->core->tables, place->node);
    note_cached_change(request, NULL, place);
}

/* Put the entry of a new inode, with n bytes that follow; or prepare them for when the node has its own number.
 * is_steady: whether its attributes were steady before it was opened. Returns a result of an operation. */
static int put_new_entry(Request *request, const Place *place, Node *node, const Stat *st, bool is_steady, int n) {
    Tables *t = request->core->tables;
    note_stored(request, node, place->node, false);
    renumber(t, node);
    put_entry_for(request, request->reply_body, node, st, is_steady, entry_timeout(request, place));
    if (!may_get_own_number(t, node))
        return ENTRY_BYTES + n;
    request->created = node_take(node);
    request->n_created_bytes = ENTRY_BYTES + n;
    return LATER;
}

/* CREATE; and TMPFILE, which makes a file without a name. LINK may give it one while it is open. */
static int create_file(Request *request, bool is_named) {
    Core *core = request->core;
    Tables *t = core->tables;
    uint32_t in[4]; /* struct fuse_create_in: flags, mode, umask, open_flags */
    Place place;
    Stat st;
    OpenedBacking opening = {0};
    int fd = -1, error;
    memcpy(in, request->op_in, sizeof in);
    int result = open_changeable(request, request->nodeid, is_named ? request->payload : "", &place);
    if (result < 0)
        return result;
    if (!make_room(t, request->uid)) {
        close_place(&place);
        return -EMFILE;
    }
    check_name_cacheable(request, &place);
    request->is_uncacheable |= !is_named;
    int flags = ((int)in[0] & ~UNSUPPORTED_FLAGS) | (is_named ? CREATE_NEW_FLAGS : O_TMPFILE | O_CLOEXEC);
    changes_begin(request, place.node, place.node);
    CallerAttempts attempts = attempt_to_create(request, &place, in[1], in[2]);
    while (next_attempt(&attempts, &error)) {
        fd = openat(place.fd->number, is_named ? place.name : ".", flags, in[1] & 07777);
        error = fd < 0 ? errno : 0;
    }
    bool is_made = fd >= 0;
    if (!error)
        error = stat_with_handle(fd, "", core->statx_flags, &st);
    if (!error) {
        check_device(request, st.dev);
        opening = open_backing(request, fd, &st);
        if (in[0] & O_APPEND)
            clear_append(fd);
    } else if (is_made)
        close(fd);
    changes_end(request, place.node, place.node);
    if (is_made && is_named)
        note_name_change(request, &place);
    if (!is_made)
        note_refusal(request, place.node, error);
    if (!error) {
        Node *node = node_for_name(request, &place, &st);
        if (!is_named)
            forget_name(t, node, place.node, place.name);
        bool is_steady = !is_unsteady(node); /* the open handle may change that */
        count_reference(node, false);
        put_handle(request, node, fd, in[0] | O_CREAT, true, &opening, request->reply_body + ENTRY_BYTES);
        result = put_new_entry(request, &place, node, &st, is_steady, OPEN_BYTES);
        node_put(node);
    } else
        /* EEXIST: created meanwhile. After ESTALE, the kernel repeats LOOKUP and its checks of permissions. */
        result = error == EEXIST && is_named && !(in[0] & O_EXCL) ? -ESTALE : -error;
    close_place(&place);
    return result;
}

int do_create(Request *request) { return create_file(request, true); }

int do_tmpfile(Request *request) {
    /* Some FUSE filesystems lose such a file when it is closed, even if it was linked. */
    return request->core->statx_flags & WITHOUT_HANDLES ? -EOPNOTSUPP : create_file(request, false);
}

/* An inode to be made: a symbolic link if there is a target, otherwise of the type in `mode`. */
typedef struct {
    uint32_t mode, rdev, umask;
    const char *target;
} NewInode;

static int make_inode_at(const NewInode *inode, const Place *place) {
    int fd = place->fd->number;
    int result = inode->target != NULL  ? symlinkat(inode->target, fd, place->name)
                 : S_ISDIR(inode->mode) ? mkdirat(fd, place->name, inode->mode & 07777)
                                        : mknodat(fd, place->name, inode->mode, inode->rdev);
    return result < 0 ? errno : 0;
}

static int make_inode(Request *request, const NewInode *inode) {
    Core *core = request->core;
    Place place;
    Stat st;
    int error;
    int result = open_changeable(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    check_name_cacheable(request, &place);
    changes_begin(request, place.node, place.node);
    CallerAttempts attempts = attempt_to_create(request, &place, S_ISDIR(inode->mode) ? 0 : inode->mode, inode->umask);
    while (next_attempt(&attempts, &error))
        error = make_inode_at(inode, &place);
    bool is_made = !error;
    if (is_made)
        error = stat_opened(place.fd->number, place.name, core->statx_flags, &st);
    if (!error)
        check_device(request, st.dev);
    changes_end(request, place.node, place.node);
    if (is_made)
        note_name_change(request, &place);
    else
        note_refusal(request, place.node, error);
    if (!error) {
        Node *node = node_for_name(request, &place, &st);
        count_reference(node, true);
        result = put_new_entry(request, &place, node, &st, !is_unsteady(node), 0);
        node_put(node);
    }
    close_place(&place);
    return error ? -error : result;
}

int do_mkdir(Request *request) {
    uint32_t in[2]; /* struct fuse_mkdir_in: mode, umask */
    memcpy(in, request->op_in, sizeof in);
    return make_inode(request, &(NewInode){.mode = (in[0] & 07777) | S_IFDIR, .umask = in[1]});
}

int do_mknod(Request *request) {
    uint32_t in[4]; /* struct fuse_mknod_in: mode, rdev, umask, padding */
    memcpy(in, request->op_in, sizeof in);
    return make_inode(request, &(NewInode){.mode = in[0], .rdev = in[1], .umask = in[2]});
}

int do_symlink(Request *request) {
    return make_inode(request, &(NewInode){.target = request->payload + strlen(request->payload) + 1});
}

int do_link(Request *request) {
    Core *core = request->core;
    uint64_t nodeid;
    Place place;
    Route route;
    Stat st;
    char path[32];
    int held;
    memcpy(&nodeid, request->op_in, sizeof nodeid);
    int result = open_changeable(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    result = open_route(request, nodeid, &route);
    if (result < 0) {
        close_place(&place);
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    }
    check_name_cacheable(request, &place);
    changes_begin(request, place.node, route.node);
    int error = reach_inode(request->core, &route, &st, &held);
    bool is_made = false;
    if (!error) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", held < 0 ? route.fd->number : held);
        /* The file's mode counts, too: fs.protected_hardlinks. */
        NeededCapability needs[] = {override_of_mode_of(request, place.fd->number), override_of_mode(&st),
                                    owner_of_name(&st)};
        CallerAttempts attempts = attempt_with_needs(request, needs, 3);
        while (next_attempt(&attempts, &error))
            error = linkat(AT_FDCWD, path, place.fd->number, place.name, AT_SYMLINK_FOLLOW) < 0 ? errno : 0;
        is_made = !error;
    }
    if (held >= 0)
        close(held);
    if (is_made)
        error = stat_opened(place.fd->number, place.name, core->statx_flags, &st);
    if (!error)
        check_device(request, st.dev);
    changes_end(request, place.node, route.node);
    if (is_made) {
        note_name_change(request, &place);
        note_cached_change(request, route.node, NULL);
        route.node->cached_until_s = 0; /* attributes of a file with several names have a shorter timeout */
    } else {
        note_refusal(request, place.node, error);
        note_refusal(request, route.node, error);
    }
    if (!error)
        result = put_found_entry(request, &place, &st);
    close_route(&route);
    close_place(&place);
    return error ? -error : result;
}

/* UNLINK, RMDIR and RENAME. */

static int remove_name(Request *request, int flags) {
    Core *core = request->core;
    Place place;
    Stat st;
    int result = open_changeable(request, request->nodeid, request->payload, &place);
    if (result < 0)
        return result;
    changes_begin(request, place.node, place.node);
    int error = stat_function(request)(place.fd->number, place.name, core->statx_flags, &st);
    if (!error) {
        NeededCapability needs[] = {override_of_mode_of(request, place.fd->number), owner_of_name(&st)};
        CallerAttempts attempts = attempt_with_needs(request, needs, 2);
        while (next_attempt(&attempts, &error))
            error = unlinkat(place.fd->number, place.name, flags) < 0 ? errno : 0;
    }
    changes_end(request, place.node, place.node);
    if (!error) {
        note_name_change(request, &place);
        note_removed(request, &st, &place);
    } else
        note_refusal(request, place.node, error);
    close_place(&place);
    return -error;
}

int do_unlink(Request *request) { return remove_name(request, 0); }
int do_rmdir(Request *request) { return remove_name(request, AT_REMOVEDIR); }

/* Return whether two names belong to one inode. */
static bool are_same_inode(const Stat *st, const Stat *other) {
    Source source = source_of(st), than = source_of(other);
    return source.dev == than.dev && source.n_handle == than.n_handle &&
           (source.n_handle ? !memcmp(source.handle, than.handle, source.n_handle)
                            : source.ino == than.ino && source.btime_ns == than.btime_ns);
}

/* Update the tables after a rename. no_other: the new name did not exist */
static void update_renamed(Request *request, const Place *old, const Place *new, const Stat *st, const Stat *other,
                           bool no_other, bool is_exchanged) {
    Tables *t = request->core->tables;
    note_directory_change(t, old->node);
    if (new->node != old->node)
        note_directory_change(t, new->node);
    if (zone_of(t, old->node) == TRASH || (is_exchanged && zone_of(t, new->node) == TRASH))
        note_left_trash(request);
    note_cached_change(request, NULL, old);
    note_cached_change(request, NULL, new);
    if (!no_other && are_same_inode(st, other))
        return; /* both names remain */
    if (is_exchanged)
        note_moved(request, other, new, old);
    else if (!no_other)
        note_removed(request, other, new);
    note_moved(request, st, old, new);
}

/* Rename with flags of renameat2(2), which the backing filesystem obeys or refuses. */
static int rename_name(Request *request, uint64_t new_parent, uint32_t flags) {
    Core *core = request->core;
    Tables *t = core->tables;
    Place old, new;
    Stat st, other;
    const char *second = request->payload + strlen(request->payload) + 1;
    const Node *to = node_of(t, new_parent);
    if (!request->is_from_python && to != NULL && !(flags & ~(uint32_t)RENAME_NOREPLACE) && is_drop_directory(t, to))
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
    int error = stat_function(request)(old.fd->number, old.name, core->statx_flags, &st);
    int no_other = stat_function(request)(new.fd->number, new.name, core->statx_flags, &other);
    if (!error && no_other != ENOENT)
        error = no_other;
    if (!error) {
        NeededCapability needs[N_NEEDS_MAX] = {override_of_mode_of(request, old.fd->number), owner_of_name(&st)};
        int n = 2;
        if (new.node != old.node)
            needs[n++] = override_of_mode_of(request, new.fd->number);
        if (!no_other)
            needs[n++] = owner_of_name(&other);
        if (old.node != new.node && S_ISDIR(st.mode)) /* its `..` changes */
            needs[n++] = override_of_mode(&st);
        if (old.node != new.node && !no_other && S_ISDIR(other.mode))
            needs[n++] = override_of_mode(&other);
        CallerAttempts attempts = attempt_with_needs(request, needs, n);
        while (next_attempt(&attempts, &error))
            error = renameat2(old.fd->number, old.name, new.fd->number, new.name, flags) < 0 ? errno : 0;
    }
    changes_end(request, old.node, new.node);
    if (!error)
        update_renamed(request, &old, &new, &st, &other, no_other, flags & RENAME_EXCHANGE);
    else {
        note_refusal(request, old.node, error);
        if (new.node != old.node)
            note_refusal(request, new.node, error);
    }
    close_place(&old);
    close_place(&new);
    return -error;
}

int do_rename(Request *request) {
    uint64_t new_parent;
    memcpy(&new_parent, request->op_in, sizeof new_parent);
    return rename_name(request, new_parent, 0);
}

int do_rename2(Request *request) {
    struct {
        uint64_t new_parent;
        uint32_t flags, padding;
    } in;
    memcpy(&in, request->op_in, sizeof in);
    return rename_name(request, in.new_parent, in.flags);
}
