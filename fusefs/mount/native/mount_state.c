/* Rules for the tables, as the Python code has them: what may be cached, and what is noted about changes. */
#include "core.h"

#include <stdio.h>

static const char STORES[] = ".trashd"; /* all names of stores begin with it, and no other names of ours */
static const char DROP[] = "drop";
enum { UID_DIGITS = 10, N_HEX = 12 };  /* from core/names.py */

uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

/* Report to Python how long some stats took together, if that says something about the filesystem. */
void tell_took(Request *request, const Timed *timed, int n) {
    const Core *core = request->core;
    bool is_in_doubt = __atomic_load_n(&core->is_in_doubt, __ATOMIC_RELAXED);
    if (!core->is_measured || !request->is_timed || !timed->tells ||
        (!is_in_doubt && timed->ns <= (uint64_t)n * core->quick_ns))
        return;
    request->looks_ns += timed->ns;
    request->n_looks += n;
}

/* Return whether the core may serve a request: the filesystem is not slow, and the caller did not just get ESTALE. */
bool is_at_rest(const Request *request) {
    const Core *core = request->core;
    const Tables *t = core->tables;
    for (uint32_t at = 0; at < t->n_retries; at++)
        if (t->retries[at] == request->pid)
            return false;
    return !t->is_caching && !__atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED);
}

/* Nodes. */

bool is_root(const Core *core, const Node *node) { return node == core->tables->root; }

/* Return whether a node lies outside of all stores. */
bool is_outside(Core *core, Node *node) { return zone_of(core->tables, node) == OUTSIDE; }

/* Return whether a directory is on the mount's own filesystem, outside of all stores, and distinguishes letter case. */
bool is_plain(Core *core, Node *directory) {
    return (core->tables->is_case_sensitive || directory->is_case_sensitive) && directory->dev == core->root_dev &&
           is_outside(core, directory);
}

/* Return whether a directory is a user's drop folder, in any store. */
bool is_drop_folder(Tables *t, const Node *directory) {
    Node *above = directory->at.parent;
    return above != NULL && !strcmp(directory->at.name, DROP) && zone_of(t, above) == STORE;
}

/* Return whether a name is the link to the caller's drop folder, which exists in the mount only
 * (tree/trashd_dir.py). */
bool is_drop_name(const Core *core, const Node *directory, const char *name) {
    char own[sizeof STORES + 1 + UID_DIGITS];
    if (strcmp(name, DROP) || directory->at.parent != core->tables->root)
        return false;
    snprintf(own, sizeof own, "%s-%u", STORES, geteuid());
    return !strcmp(directory->at.name, STORES) || !strcmp(directory->at.name, own);
}

/* Return whether a name may be a store's. */
bool is_stores(const char *name) { return !strncmp(name, STORES, sizeof STORES - 1); }

/* Return whether a stat of a name may block on a filesystem mounted there. Only base names of mount points are known,
 * so the same name elsewhere counts, too. */
bool may_wait(const Core *core, const char *name) {
    for (const char *at = core->tables->waiting; at != NULL && *at; at += strlen(at) + 1)
        if (!strcmp(at, name))
            return true;
    return false;
}

/* Return whether a name is a store's, as is_stores_own in store/layout.py. */
bool is_stores_own(const char *name) {
    static const char hex[] = "0123456789abcdef", digits[] = "0123456789", made[] = ".new-";
    if (!is_stores(name))
        return false;
    name += sizeof STORES - 1;
    if (*name == '\0' || !strncmp(name, made, sizeof made - 1))
        return true;
    if (*name++ != '-')
        return false;
    size_t n = strspn(name, digits);
    bool is_plain = n && n <= UID_DIGITS && (n == 1 || *name != '0') && strtoull(name, NULL, 10) < UINT32_MAX;
    if (!is_plain || name[n] == '\0')
        return is_plain;
    name += n + 1;
    return name[-1] == '.' && strlen(name) == N_HEX && strspn(name, hex) == N_HEX;
}

/* Get a directory, its fd, and a name in it if there is one. Returns 0 or a negative errno. */
int open_place(Request *request, uint64_t nodeid, const char *name, Place *place) {
    Node *node = node_of(request->core->tables, nodeid);
    *place = (Place){.name = name};
    if (node == NULL)
        return -ESTALE;
    if (node->last != NULL)
        return -ENOENT;
    if (!node->is_directory)
        return -ENOTDIR;
    place->node = node_take(node);
    place->fd = directory_fd(request->core->tables, node);
    if (place->fd != NULL)
        return 0;
    calls_begin(request);
    int error = open_directory(request->core, node, &place->fd);
    calls_end(request);
    if (error)
        close_place(place);
    return -error;
}

/* Return whether no name in a directory may be cached: names in stores change behind the mount, and in a directory that
 * ignores letter case one file has many names. May release the tables lock. fd: of the directory */
bool are_fickle_in(Request *request, Node *directory, int fd) {
    const Tables *t = request->core->tables;
    bool is_exact = directory->is_case_sensitive || (t->is_case_sensitive && directory->dev == request->core->root_dev);
    if (!is_outside(request->core, directory))
        return true;
    if (is_exact)
        return false;
    calls_begin(request);
    bool folds = ask_folds(request, directory, fd);
    calls_end(request);
    return folds;
}

/* Determine whether a name may be cached. May release the tables lock. */
void see_fickle(Request *request, const Place *place) {
    request->is_fickle = is_stores_own(place->name) || are_fickle_in(request, place->node, place->fd->number);
}

/* Determine whether attributes on a device may be cached. Called without the tables lock. */
void see_device(Request *request, uint64_t dev) {
    if (dev != request->core->root_dev)
        request->is_unasked = !ask_device(request, dev);
}

void close_place(Place *place) {
    fd_put(place->fd);
    node_put(place->node);
    *place = (Place){0};
}

/* Return the node of an inode that was stat'ed under a name, with one reference. */
Node *learn(Request *request, const Place *place, const Seen *seen) {
    Source source = source_of(seen);
    return node_take(
        learn_node(request->core->tables, &source, S_ISDIR(seen->mode), seen->nlink > 1, place->node, place->name));
}

/* What the kernel has cached. */

/* Invalidate attributes in the kernel, as forget_attributes does. */
void notify_attributes(const Tables *t, const Node *node) {
    struct {
        uint32_t size;
        int32_t code;
        uint64_t unique, nodeid;
        int64_t offset, length;
    } notice = {sizeof notice, 2, 0, node->nodeid, -1, 0};
    if (t->device >= 0 && write(t->device, &notice, sizeof notice) < 0) { /* the kernel does not know the node */
    }
}

/* Invalidate what the kernel was sent about a node, including replies that have not reached it yet. */
void renew(Tables *t, Node *node) {
    node->is_told = node->is_lasting = false;
    node->told_until_s = 0;
    notify_attributes(t, node);
}

/* Invalidate the directories with a long attr timeout that lie in this zone or a later one. */
void renew_lasting(Tables *t, Zone zone) {
    for (uint64_t at = 0; at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at]; node != NULL; node = node->next_by_nodeid)
            if (node->is_lasting && zone_of(t, node) >= zone)
                renew(t, node);
}

/* Note a change in a directory, or of its attributes, as AttrTimeouts.changed. */
void changed(Tables *t, Node *node) {
    node->changed_s = (double)now_ns() / 1e9;
    if (node->is_lasting || node->is_told)
        renew(t, node);
}

/* Return whether the kernel's cached pages of a file or directory that was just opened and stat'ed are valid.
 *
 * If others may change it behind the mount, they are valid if times and size are those of the last open, and were not
 * new then: clocks of filesystems tick slowly, and two writes in one tick have the same time. */
bool pages_are_right(const Tables *t, Node *node, const Seen *seen) {
    int64_t mtime_ns = in_ns(seen->mtime_s, seen->mtime_ns), ctime_ns = in_ns(seen->ctime_s, seen->ctime_ns);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    bool are_right = node->page_size == (int64_t)seen->size && node->page_mtime_ns == mtime_ns &&
                     node->page_ctime_ns == ctime_ns;
    int64_t age_ns = in_ns(now.tv_sec, (uint32_t)now.tv_nsec) - ctime_ns; /* setting a later mtime sets ctime to now */
    node->page_mtime_ns = mtime_ns, node->page_ctime_ns = ctime_ns;
    node->page_size = age_ns > t->racy_ns ? (int64_t)seen->size : -1;
    return are_right;
}

/* Note a change for Python's cache, if it is in use: of an inode, of a name in a directory, or both. source, place: may
 * be NULL. has_ended: the inode has lost its last link */
void forget_source(Request *request, const Source *source, const Place *place, bool has_ended) {
    if (!request->core->tables->is_caching)
        return;
    Cached *cached = allocate(NULL, sizeof *cached);
    cached->next = request->cached, cached->has_ended = has_ended;
    request->cached = cached;
    if (source != NULL) {
        cached->has_source = true;
        cached->source = *source;
        memcpy(cached->handle, source->handle, source->n_handle);
        cached->source.handle = cached->handle;
    }
    if (place != NULL) {
        cached->directory = node_take(place->node);
        snprintf(cached->name, sizeof cached->name, "%s", place->name);
    }
}

/* Note a change of a node for Python's cache. node, place: may be NULL */
void forget_cached(Request *request, Node *node, const Place *place) {
    Source source = node == NULL ? (Source){0} : source_of_node(node);
    forget_source(request, node == NULL ? NULL : &source, place, false);
}

/* The filesystem has refused what the kernel allowed: the kernel's attributes of the node are outdated. error: of the
 * refusal */
void mistake(Request *request, Node *node, int error) {
    if (!is_refusal(error) || !request->core->acts_as_others)
        return;
    forget_cached(request, node, NULL);
    renew(request->core->tables, node);
}

/* A client looked up a node in a directory, or moved it there. If that is a directory where the reaper deletes, Python
 * has the kernel forget the node (tree/forget_stored.py). */
void note_stored(Request *request, Node *node, Node *directory, bool is_moved) {
    if (zone_of(request->core->tables, directory) != TRASH)
        return;
    request->stored[request->n_stored++] = node_take(node);
    request->are_moved = is_moved;
}

/* Count a reference of the kernel's. is_told: its attributes are sent, too */
void counted(Node *node, bool is_told) {
    node->nlookup++;
    node->is_told |= is_told;
}
