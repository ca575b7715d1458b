/* The tables: read, and changed as the Python code changes them. */
#include "core.h"

#include <stdio.h>

static const char STORES[] = ".trashd"; /* and what begins so: no such name is ours */
static const char DROP[] = "drop";
enum { UID_DIGITS = 10, N_HEX = 12 };  /* core/names.py, whose */

uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

/* Python is to hear how long some looks have taken together, if that says anything of the filesystem. */
void tell_took(Request *request, const Timed *timed, int n) {
    const Core *core = request->core;
    bool is_in_doubt = __atomic_load_n(&core->is_in_doubt, __ATOMIC_RELAXED);
    if (!core->is_measured || !request->is_timed || !timed->tells ||
        (!is_in_doubt && timed->ns <= (uint64_t)n * core->quick_ns))
        return;
    request->looks_ns += timed->ns;
    request->n_looks += n;
}

/* Whether a request is an ordinary one: the filesystem answers quickly, and the caller was not just sent ESTALE. */
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

/* Whether a node lies outside of all stores. */
bool is_outside(Core *core, Node *node) { return zone_of(core->tables, node) == OUTSIDE; }

/* Whether a directory is on the volume's own filesystem, outside of all stores, and its letter case matters. */
bool is_plain(Core *core, Node *directory) {
    return (core->tables->is_case_sensitive || directory->is_case_sensitive) && directory->dev == core->root_dev &&
           is_outside(core, directory);
}

/* Whether a directory is a user's drop folder, in whatever store. */
bool is_drop_folder(Tables *t, const Node *directory) {
    Node *above = directory->at.parent;
    return above != NULL && !strcmp(directory->at.name, DROP) && zone_of(t, above) == STORE;
}

/* Whether a name is the link to the caller's drop folder, which no disk has (tree/trashd_dir.py). */
bool is_drop_name(const Core *core, const Node *directory, const char *name) {
    char own[sizeof STORES + 1 + UID_DIGITS];
    if (strcmp(name, DROP) || directory->at.parent != core->tables->root)
        return false;
    snprintf(own, sizeof own, "%s-%u", STORES, geteuid());
    return !strcmp(directory->at.name, STORES) || !strcmp(directory->at.name, own);
}

/* Whether a name may be a store's own. */
bool is_stores(const char *name) { return !strncmp(name, STORES, sizeof STORES - 1); }

/* Whether a look at a name may have to wait for what is mounted there. Any mount point of that name may be meant: their
 * directories are not known. */
bool may_wait(const Core *core, const char *name) {
    for (const char *at = core->tables->waiting; at != NULL && *at; at += strlen(at) + 1)
        if (!strcmp(at, name))
            return true;
    return false;
}

/* Whether a name is a store's: store/layout.py, is_stores_own. */
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

/* A directory, and a name in it if there is one. Returns 0 or a negative errno. */
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

/* Whether no name in a directory may be believed: names in stores change behind the mount, and where letter case does not
 * matter one name is many. The tables' lock may be let go. fd: of the directory */
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

/* See whether what a name means may not be believed. The tables' lock may be let go. */
void see_fickle(Request *request, const Place *place) {
    request->is_fickle = is_stores_own(place->name) || are_fickle_in(request, place->node, place->fd->number);
}

/* See whether attributes on a device may be believed. Without the tables. */
void see_device(Request *request, uint64_t dev) {
    if (dev != request->core->root_dev)
        request->is_unasked = !ask_device(request, dev);
}

void close_place(Place *place) {
    fd_put(place->fd);
    node_put(place->node);
    *place = (Place){0};
}

/* The node of what was seen under a name in a plain directory, with one use. */
Node *learn(Request *request, const Place *place, const Seen *seen) {
    Source source = source_of(seen);
    return node_take(
        learn_node(request->core->tables, &source, S_ISDIR(seen->mode), seen->nlink > 1, place->node, place->name));
}

/* What the kernel believes. */

/* Have the kernel ask for attributes when they are wanted next, as forget_attributes. */
void notify_attributes(const Tables *t, const Node *node) {
    struct {
        uint32_t size;
        int32_t code;
        uint64_t unique, nodeid;
        int64_t offset, length;
    } notice = {sizeof notice, 2, 0, node->nodeid, -1, 0};
    if (t->device >= 0 && write(t->device, &notice, sizeof notice) < 0) { /* it does not know it, or not any more */
    }
}

/* What the kernel was sent of a node is void, and what is under way to it. */
void renew(Tables *t, Node *node) {
    node->is_told = node->is_lasting = false;
    node->told_until_s = 0;
    notify_attributes(t, node);
}

/* What the kernel was sent of directories, and believes for long, is void: of those in a zone, or further inside. */
void renew_lasting(Tables *t, Zone zone) {
    for (uint64_t at = 0; at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at]; node != NULL; node = node->next_by_nodeid)
            if (node->is_lasting && zone_of(t, node) >= zone)
                renew(t, node);
}

/* Something in a directory, or of itself, has changed, as AttrTimeouts.changed. */
void changed(Tables *t, Node *node) {
    node->changed_s = (double)now_ns() / 1e9;
    if (node->is_lasting || node->is_told)
        renew(t, node);
}

/* Whether the kernel's pages of a file or directory are right, that was just opened and looked at.
 *
 * They are, where others change a file or the names in a directory behind the mount, if its times and size are those of
 * the last open, and had been so for a while then: clocks of filesystems tick slowly, and what is written in the same
 * tick can't be told apart. */
bool pages_are_right(const Tables *t, Node *node, const Seen *seen) {
    int64_t mtime_ns = in_ns(seen->mtime_s, seen->mtime_ns), ctime_ns = in_ns(seen->ctime_s, seen->ctime_ns);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    bool are_right = node->page_size == (int64_t)seen->size && node->page_mtime_ns == mtime_ns &&
                     node->page_ctime_ns == ctime_ns;
    int64_t age_ns = in_ns(now.tv_sec, (uint32_t)now.tv_nsec) - ctime_ns; /* what sets a later mtime sets this to now */
    node->page_mtime_ns = mtime_ns, node->page_ctime_ns = ctime_ns;
    node->page_size = age_ns > t->racy_ns ? (int64_t)seen->size : -1;
    return are_right;
}

/* What was changed is to be forgotten, if others have cached anything meanwhile: an inode, a name in a directory, or both.
 * source, place: may be NULL. has_ended: the inode has lost its last link */
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

/* The same of a node. node, place: may be NULL */
void forget_cached(Request *request, Node *node, const Place *place) {
    Source source = node == NULL ? (Source){0} : source_of_node(node);
    forget_source(request, node == NULL ? NULL : &source, place, false);
}

/* The caller was refused what the kernel let it ask: the node is not what the kernel took it for. error: of the refusal */
void mistake(Request *request, Node *node, int error) {
    if (!is_refusal(error) || !request->core->acts_as_others)
        return;
    forget_cached(request, node, NULL);
    renew(request->core->tables, node);
}

/* A client looked up a node in a directory, or moved it there: if that is what a reaper takes from, Python has the
 * kernel forget it (tree/forget_stored.py). */
void note_stored(Request *request, Node *node, Node *directory, bool is_moved) {
    if (zone_of(request->core->tables, directory) != TRASH)
        return;
    request->stored[request->n_stored++] = node_take(node);
    request->are_moved = is_moved;
}

/* The kernel has one more reference. */
void counted(Node *node, bool is_told) {
    node->nlookup++;
    node->is_told |= is_told;
}
