/* Which replies the kernel and the daemon may cache, and what a change or a refused request makes invalid. */
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

/* Report to Python how long some stats took together, if that shows how fast the filesystem is. */
void report_stat_time(Request *request, const StatTimer *timer, int n) {
    const Core *core = request->core;
    bool is_in_doubt = __atomic_load_n(&core->is_in_doubt, __ATOMIC_RELAXED);
    if (!core->is_measured || !request->is_timed || !timer->is_meaningful ||
        (!is_in_doubt && timer->ns <= (uint64_t)n * core->quick_ns))
        return;
    request->timed_stats_ns += timer->ns;
    request->n_timed_stats += n;
}

/* Return whether the core may serve a request: the filesystem is not slow, and the caller did not just get ESTALE. */
bool may_serve_in_core(const Request *request) {
    const Core *core = request->core;
    const Tables *t = core->tables;
    for (uint32_t at = 0; at < t->n_retrying; at++)
        if (t->retrying_pids[at] == request->pid)
            return false;
    return !t->is_caching && !__atomic_load_n(&core->mutex->is_slow, __ATOMIC_RELAXED);
}

/* Nodes. */

bool is_root(const Core *core, const Node *node) { return node == core->tables->root; }

bool is_outside(Core *core, Node *node) { return zone_of(core->tables, node) == OUTSIDE; }

/* Return whether a directory is on the mount's own filesystem, outside of all stores, and distinguishes letter case. */
bool is_plain(Core *core, Node *directory) {
    return (core->tables->is_case_sensitive || directory->is_case_sensitive) && directory->dev == core->root_dev &&
           is_outside(core, directory);
}

/* Return whether a directory is a user's drop directory, in any store. */
bool is_drop_directory(Tables *t, const Node *directory) {
    Node *above = directory->found_at.parent;
    return above != NULL && !strcmp(directory->found_at.name, DROP) && zone_of(t, above) == STORE;
}

/* Return whether a name is the link to the caller's drop directory, which exists in the mount
 * only (tree/trashd_dir.py). */
bool is_drop_link_name(const Core *core, const Node *directory, const char *name) {
    char own[sizeof STORES + 1 + UID_DIGITS];
    if (strcmp(name, DROP) || directory->found_at.parent != core->tables->root)
        return false;
    snprintf(own, sizeof own, "%s-%u", STORES, geteuid());
    return !strcmp(directory->found_at.name, STORES) || !strcmp(directory->found_at.name, own);
}

/* Return whether a name may be a store's. */
bool may_be_store_name(const char *name) { return !strncmp(name, STORES, sizeof STORES - 1); }

/* Return whether a stat of a name may block on a filesystem mounted there. The tables have only the base names of
 * mount points, so the same name elsewhere counts, too. */
bool may_block(const Core *core, const char *name) {
    for (const char *at = core->tables->blocking_names; at != NULL && *at; at += strlen(at) + 1)
        if (!strcmp(at, name))
            return true;
    return false;
}

/* Return whether a name is a store's, like is_stores_own in store/layout.py. */
bool is_stores_own(const char *name) {
    static const char hex[] = "0123456789abcdef", digits[] = "0123456789", made[] = ".new-";
    if (!may_be_store_name(name))
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
    if (node->final_stat != NULL)
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
bool are_names_uncacheable(Request *request, Node *directory, int fd) {
    const Tables *t = request->core->tables;
    bool is_exact = directory->is_case_sensitive || (t->is_case_sensitive && directory->dev == request->core->root_dev);
    if (!is_outside(request->core, directory))
        return true;
    if (is_exact)
        return false;
    calls_begin(request);
    bool folds = query_folding(request, directory, fd);
    calls_end(request);
    return folds;
}

/* Determine whether a name may be cached. May release the tables lock. */
void check_name_cacheable(Request *request, const Place *place) {
    request->is_uncacheable = is_stores_own(place->name) ||
                              are_names_uncacheable(request, place->node, place->fd->number);
}

/* Determine whether attributes on a device may be cached. Called without the tables lock. */
void check_device(Request *request, uint64_t dev) {
    if (dev != request->core->root_dev)
        request->is_unverified = !query_device(request, dev);
}

void close_place(Place *place) {
    fd_put(place->fd);
    node_put(place->node);
    *place = (Place){0};
}

/* Return the node of an inode that was stat'ed under a name, with one reference. */
Node *node_for_name(Request *request, const Place *place, const Stat *st) {
    Source source = source_of(st);
    return node_take(
        learn_node(request->core->tables, &source, S_ISDIR(st->mode), st->nlink > 1, place->node, place->name));
}

/* The kernel's caches. */

/* Invalidate attributes in the kernel, as forget_attributes does. */
void notify_inval_inode(const Tables *t, const Node *node) {
    struct {
        uint32_t size;
        int32_t code;
        uint64_t unique, nodeid;
        int64_t offset, length;
    } notice = {sizeof notice, 2, 0, node->nodeid, -1, 0};
    if (t->device >= 0 && write(t->device, &notice, sizeof notice) < 0) { /* the kernel does not know the node */
    }
}

/* Invalidate the attributes and names of a node that the kernel was sent, including replies that are on their way. */
void invalidate_attributes(Tables *t, Node *node) {
    node->was_sent = node->has_long_timeout = false;
    node->cached_until_s = 0;
    notify_inval_inode(t, node);
}

/* Invalidate the directories with a long attr timeout that lie in this zone or a later one. */
void invalidate_zone(Tables *t, Zone zone) {
    for (uint64_t at = 0; at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at]; node != NULL; node = node->next_by_nodeid)
            if (node->has_long_timeout && zone_of(t, node) >= zone)
                invalidate_attributes(t, node);
}

/* Note a change in a directory, or of its attributes, like AttrTimeouts.note_change. */
void note_directory_change(Tables *t, Node *node) {
    node->changed_s = (double)now_ns() / 1e9;
    if (node->has_long_timeout || node->was_sent)
        invalidate_attributes(t, node);
}

/* Return whether the kernel's cached pages of a file or directory that was just opened and stat'ed are valid.
 *
 * If others may change it behind the mount, they are valid if times and size are those of the last open, and the times
 * were not new then: clocks of filesystems tick slowly, and two writes in one tick have the same time. */
bool are_pages_valid(const Tables *t, Node *node, const Stat *st) {
    int64_t mtime_ns = in_ns(st->mtime_s, st->mtime_ns), ctime_ns = in_ns(st->ctime_s, st->ctime_ns);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    bool are_right = node->page_size == (int64_t)st->size && node->page_mtime_ns == mtime_ns &&
                     node->page_ctime_ns == ctime_ns;
    int64_t age_ns = in_ns(now.tv_sec, (uint32_t)now.tv_nsec) - ctime_ns; /* setting a later mtime sets ctime to now */
    node->page_mtime_ns = mtime_ns, node->page_ctime_ns = ctime_ns;
    node->page_size = age_ns > t->racy_ns ? (int64_t)st->size : -1;
    return are_right;
}

/* Note a change for Python's cache, if it is in use: of an inode, of a name in a directory, or both. source, place: may
 * be NULL. has_ended: the inode has lost its last link */
void note_source_change(Request *request, const Source *source, const Place *place, bool has_ended) {
    if (!request->core->tables->is_caching)
        return;
    CacheChange *change = allocate(NULL, sizeof *change);
    change->next = request->cache_changes, change->has_ended = has_ended;
    request->cache_changes = change;
    if (source != NULL) {
        change->has_source = true;
        change->source = *source;
        memcpy(change->handle, source->handle, source->n_handle);
        change->source.handle = change->handle;
    }
    if (place != NULL) {
        change->directory = node_take(place->node);
        snprintf(change->name, sizeof change->name, "%s", place->name);
    }
}

/* Note a change of a node for Python's cache. node, place: may be NULL */
void note_cached_change(Request *request, Node *node, const Place *place) {
    Source source = node == NULL ? (Source){0} : source_of_node(node);
    note_source_change(request, node == NULL ? NULL : &source, place, false);
}

/* Note that the filesystem refused an access that the kernel allowed: the kernel's attributes of the node are outdated.
 * error: of the refusal */
void note_refusal(Request *request, Node *node, int error) {
    if (!is_permission_error(error) || !request->core->acts_as_others)
        return;
    note_cached_change(request, node, NULL);
    invalidate_attributes(request->core->tables, node);
}

/* Note that a client sent LOOKUP for a node in a directory, or moved it there. If that is a directory where the reaper
 * deletes, Python has the kernel forget the node (tree/forget_stored.py). */
void note_stored(Request *request, Node *node, Node *directory, bool is_moved) {
    if (zone_of(request->core->tables, directory) != TRASH)
        return;
    request->stored_nodes[request->n_stored++] = node_take(node);
    request->are_moved = is_moved;
}

/* Count a reference that the kernel gets. is_sent: the node's attributes are sent, too */
void count_reference(Node *node, bool is_sent) {
    node->nlookup++;
    node->was_sent |= is_sent;
}
