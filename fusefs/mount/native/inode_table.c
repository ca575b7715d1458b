/* The nodes that the kernel knows: a nodeid means one incarnation of one inode as long as the kernel refers to it.
 *
 * A node exists iff the kernel holds references to it, a handle of it is open, or it is the root (I7). Meanwhile its
 * nodeid is not assigned to another node (I9). Nothing here makes system calls. */
#include "core.h"

#include <stdio.h>

static const uint64_t ROOT = 1, PRIVATE = 1ull << 62, TOP = 1ull << 62, NEVER = UINT64_MAX;
enum { N_BUCKETS_FIRST = 64 };

/* Allocate memory, or end the process: incomplete tables would be worse, and --replace restores the mount. */
void *allocate(void *old, size_t n_bytes) {
    void *memory = old == NULL ? calloc(1, n_bytes) : realloc(old, n_bytes);
    if (memory == NULL) {
        fputs("trashd: no memory for the tables of the mount\n", stderr);
        _exit(70);
    }
    return memory;
}

/* Two hash tables. */

static uint64_t hash_of(const Source *source) {
    uint64_t hash = source->dev * 0x9E3779B97F4A7C15u;
    if (!source->n_handle)
        return (hash ^ source->ino) * 0x9E3779B97F4A7C15u;
    for (uint32_t at = 0; at < source->n_handle; at++)
        hash = (hash ^ (unsigned char)source->handle[at]) * 0x100000001B3u;
    return hash * 0x9E3779B97F4A7C15u;
}

Source source_of_node(const Node *node) {
    return (Source){node->dev, node->ino, node->btime_ns, node->handle, node->n_handle};
}

static Node **at_nodeid(const Tables *t, uint64_t nodeid) {
    return &t->by_nodeid[nodeid * 0x9E3779B97F4A7C15u >> 32 & (t->n_buckets - 1)];
}

static Node **at_source(const Tables *t, const Source *source) {
    return &t->by_source[hash_of(source) >> 32 & (t->n_buckets - 1)];
}

static void enter_nodeid(Tables *t, Node *node) {
    Node **head = at_nodeid(t, node->nodeid);
    node->next_by_nodeid = *head, *head = node;
}

static void enter_source(Tables *t, Node *node) {
    Source source = source_of_node(node);
    Node **head = at_source(t, &source);
    node->next_by_source = *head, *head = node;
}

static void leave_nodeid(Tables *t, Node *node) {
    Node **at = at_nodeid(t, node->nodeid);
    while (*at != node)
        at = &(*at)->next_by_nodeid;
    *at = node->next_by_nodeid;
}

static void leave_source(Tables *t, Node *node) {
    if (!node->is_live)
        return;
    node->is_live = false;
    Source source = source_of_node(node);
    Node **at = at_source(t, &source);
    while (*at != node)
        at = &(*at)->next_by_source;
    *at = node->next_by_source;
}

static void grow(Tables *t) {
    uint64_t n_before = t->n_buckets;
    Node **nodeids = t->by_nodeid, **sources = t->by_source;
    t->n_buckets = n_before ? 2 * n_before : N_BUCKETS_FIRST;
    t->by_nodeid = allocate(NULL, t->n_buckets * sizeof *nodeids);
    t->by_source = allocate(NULL, t->n_buckets * sizeof *sources);
    for (uint64_t at = 0; at < n_before; at++) {
        for (Node *node = nodeids[at], *next; node != NULL; node = next) {
            next = node->next_by_nodeid;
            enter_nodeid(t, node);
        }
        for (Node *node = sources[at], *next; node != NULL; node = next) {
            next = node->next_by_source;
            enter_source(t, node);
        }
    }
    free(nodeids);
    free(sources);
}

/* Return the node of a nodeid; NULL: none. */
Node *node_of(const Tables *t, uint64_t nodeid) {
    if (nodeid == ROOT || nodeid == TOP)
        return nodeid == ROOT ? (t->hides_root ? NULL : t->root) : t->has_top ? t->root : NULL;
    Node *node = *at_nodeid(t, nodeid);
    while (node != NULL && node->nodeid != nodeid)
        node = node->next_by_nodeid;
    return node;
}

/* Return the live node of an inode; NULL: none. */
Node *find_node(const Tables *t, const Source *source) {
    Node *node = *at_source(t, source);
    for (; node != NULL; node = node->next_by_source) {
        if (node->dev != source->dev || node->n_handle != source->n_handle)
            continue;
        if (source->n_handle ? !memcmp(node->handle, source->handle, source->n_handle)
                             : node->ino == source->ino && node->btime_ns == source->btime_ns)
            break;
    }
    return node;
}

/* References: from the table, from names of other nodes, from requests and from Python. They only keep memory. */

Node *node_take(Node *node) {
    __atomic_add_fetch(&node->n_uses, 1, __ATOMIC_RELAXED);
    return node;
}

static void set_name(NodeName *at, Node *parent, const char *name) {
    NodeName before = *at;
    *at = (NodeName){parent == NULL ? NULL : node_take(parent), NULL};
    if (name != NULL)
        at->name = strcpy(allocate(NULL, strlen(name) + 1), name);
    free(before.name);
    if (before.parent != NULL)
        node_put(before.parent);
}

static void forget_others(Node *node) {
    for (int at = 0; node->other_names != NULL && at < N_OTHERS_MAX; at++)
        set_name(&node->other_names[at], NULL, NULL);
    free(node->other_names);
    node->other_names = NULL;
}

void node_put(Node *node) {
    /* A loop, since recursion in a deep tree would need a deep stack. */
    while (node != NULL && !__atomic_sub_fetch(&node->n_uses, 1, __ATOMIC_ACQ_REL)) {
        Node *parent = node->found_at.parent;
        forget_others(node);
        free(node->found_at.name);
        free(node->final_stat);
        free(node);
        node = parent;
    }
}

static Node *new_node(Tables *t, uint64_t nodeid, const Source *source, bool is_directory) {
    Node *node = allocate(NULL, sizeof *node + source->n_handle);
    node->nodeid = nodeid;
    node->number = ++t->n_made;
    node->dev = source->dev, node->ino = source->ino, node->btime_ns = source->btime_ns;
    node->is_directory = is_directory;
    node->is_live = node->is_listed = true;
    node->epoch = NEVER;
    node->n_uses = 1;
    node->page_size = node->writer_uid = node->kept_fd = -1;
    node->n_handle = source->n_handle;
    if (source->n_handle)
        memcpy(node->handle, source->handle, source->n_handle);
    if (++t->n_nodes > t->n_buckets)
        grow(t);
    enter_nodeid(t, node);
    enter_source(t, node);
    return node;
}

static uint64_t choose_nodeid(Tables *t, const Source *source) {
    uint64_t ino = source->ino;
    if (source->dev == t->root_dev && ino > ROOT && ino < PRIVATE && node_of(t, ino) == NULL)
        return ino;
    return PRIVATE + ++t->n_private;
}

void tables_make(Tables *t, const Source *root, int root_fd) {
    grow(t);
    t->root_dev = root->dev;
    t->root = new_node(t, ROOT, root, true);
    t->root->dir_fd = fd_new(root_fd, -1, 0);
    t->device = -1;
    t->opens_directories = true;
}

/* Set whether clients know the root as TOP. The kernel may use ROOT for it as well, until `hides_root` is set. */
void show_top(Tables *t, bool is_shown) {
    leave_nodeid(t, t->root);
    t->root->nodeid = is_shown ? TOP : ROOT;
    enter_nodeid(t, t->root);
    t->has_top = true;
}

void tables_free(Tables *t) {
    close_tables(t);
    free(t->root->dir_fd); /* the caller still owns the fd */
    for (uint64_t at = 0; at < t->n_buckets; at++)
        for (Node *node = t->by_nodeid[at], *next; node != NULL; node = next) {
            next = node->next_by_nodeid;
            node_put(node);
        }
    free(t->by_nodeid);
    free(t->by_source);
    free(t->handles);
    free(t->blocking_names);
    free(t->shares);
}

/* Zones: where a node lies. */

/* A store further down counts, too: a volume has one there if its top directory can't have one. */
static Zone zone_in(Zone above, const char *name) {
    static const char *const hold_trash[] = {"drop", "stage", "orphans", "reaping", "restoring", "quarantine"};
    if (above == OUTSIDE)
        return is_stores_own(name) ? STORE : OUTSIDE;
    for (size_t at = 0; at < sizeof hold_trash / sizeof *hold_trash; at++)
        if (!strcmp(name, hold_trash[at]))
            return TRASH;
    return above;
}

/* The cost does not depend on the depth, except for the first call in an epoch. */
Zone zone_of(Tables *t, Node *node) {
    if (node->epoch == t->epoch)
        return node->zone;
    size_t n = 0;
    Node *at = node;
    for (; at->epoch != t->epoch && at->found_at.parent != NULL; at = at->found_at.parent)
        n++;
    at->epoch = t->epoch; /* the root, or a node without a name, whose zone no longer changes */
    Zone zone = at->zone;
    Node **unzoned = n ? allocate(NULL, n * sizeof *unzoned) : NULL;
    at = node;
    for (size_t number = 0; number < n; number++, at = at->found_at.parent)
        unzoned[number] = at;
    t->n_zoned += n;
    while (n--) {
        unzoned[n]->zone = zone = zone_in(zone, unzoned[n]->found_at.name);
        unzoned[n]->epoch = t->epoch;
    }
    free(unzoned);
    return zone;
}

/* Update the zone of a node that was moved. If it changes, so do the zones of all nodes below: a new epoch begins. */
static void update_zone(Tables *t, Node *node) {
    if (node->epoch != t->epoch)
        return; /* its zone is unknown, and so are those of all nodes in it, which can't be found without it */
    Zone before = node->zone;
    node->epoch = NEVER;
    if (zone_of(t, node) != before && node->is_directory)
        t->epoch++;
}

/* Names. */

static bool is_named(const NodeName *at, const Node *parent, const char *name) {
    return at->parent == parent && at->name != NULL && !strcmp(at->name, name);
}

bool is_at(const Node *node, const Node *parent, const char *name) { return is_named(&node->found_at, parent, name); }

/* Note that a node has lost its last name. Its zone, and that of all nodes below it, stays the same. */
static void forget_all_names(Tables *t, Node *node) {
    zone_of(t, node);
    set_name(&node->found_at, NULL, NULL);
    forget_others(node);
}

/* If the node is above its new parent in the tables, a directory between them was moved behind the mount: detach it. */
static void cut_off_above(Tables *t, Node *node, Node *parent) {
    for (Node *at = parent; at->found_at.parent != NULL; at = at->found_at.parent)
        if (at->found_at.parent == node) {
            forget_all_names(t, at);
            return;
        }
}

static void keep_as_other_name(Node *node) {
    if (node->found_at.parent == NULL)
        return;
    if (node->other_names == NULL)
        node->other_names = allocate(NULL, N_OTHERS_MAX * sizeof *node->other_names);
    set_name(&node->other_names[N_OTHERS_MAX - 1], NULL, NULL);
    memmove(node->other_names + 1, node->other_names, (N_OTHERS_MAX - 1) * sizeof *node->other_names);
    node->other_names[0] = node->found_at;
    node->found_at = (NodeName){NULL, NULL};
}

/* Set the name of a node. is_linked: in addition to its other names */
void set_node_name(Tables *t, Node *node, Node *parent, const char *name, bool is_linked) {
    if (is_named(&node->found_at, parent, name) || parent == node) /* parent == node: a mount of it in itself */
        return;
    bool is_elsewhere = node->found_at.parent != parent;
    if (is_linked) {
        keep_as_other_name(node);
        for (int at = 0; node->other_names != NULL && at < N_OTHERS_MAX; at++)
            if (is_named(&node->other_names[at], parent, name))
                set_name(&node->other_names[at], NULL, NULL);
    } else
        forget_others(node);
    if (node->is_directory && is_elsewhere)
        cut_off_above(t, node, parent);
    set_name(&node->found_at, parent, name);
    update_zone(t, node);
}

void forget_name(Tables *t, Node *node, Node *parent, const char *name) {
    NodeName *other = NULL;
    for (int at = 0; node->other_names != NULL && at < N_OTHERS_MAX; at++)
        if (is_named(&node->other_names[at], parent, name))
            set_name(&node->other_names[at], NULL, NULL);
        else if (other == NULL && node->other_names[at].parent != NULL)
            other = &node->other_names[at];
    if (!is_named(&node->found_at, parent, name))
        return;
    if (other == NULL) {
        forget_all_names(t, node);
        return;
    }
    set_name(&node->found_at, NULL, NULL);
    node->found_at = *other;
    *other = (NodeName){NULL, NULL};
    update_zone(t, node);
}

/* Replace a name of a node by another one. */
void move_node(Tables *t, Node *node, Node *old_parent, const char *old, Node *new_parent, const char *new) {
    if (!node->is_directory)
        forget_name(t, node, old_parent, old);
    set_node_name(t, node, new_parent, new, !node->is_directory);
}

/* Creation and end of nodes. */

/* Return the node of an inode that was stat'ed under a name, a new one if necessary; the kernel's reference is not
 * counted. */
Node *learn_node(Tables *t, const Source *source, bool is_directory, bool is_linked, Node *parent, const char *name) {
    Node *node = find_node(t, source);
    if (node == NULL) {
        node = new_node(t, choose_nodeid(t, source), source, is_directory);
        set_name(&node->found_at, parent, name);
    } else if (node != t->root)
        set_node_name(t, node, parent, name, is_linked && !node->is_directory);
    return node;
}

/* Return whether a node has a private number only because the kernel still knows the inode that had its own number
 * before. If that inode was deleted, and is not in use, the kernel forgets it at once: the FORGET is on its way. */
bool may_get_own_number(const Tables *t, const Node *node) {
    if (node->nodeid == node->ino || node->dev != t->root_dev || node->nlookup > 1)
        return false;
    Node *before = node_of(t, node->ino);
    return before == NULL || (before->final_stat != NULL && !before->n_open);
}

/* Give a node its own number if that is free by now. The kernel must not know the node yet. */
void renumber(Tables *t, Node *node) {
    if (!node->is_listed || !may_get_own_number(t, node) || node_of(t, node->ino) != NULL)
        return;
    leave_nodeid(t, node);
    node->nodeid = node->ino;
    enter_nodeid(t, node);
}

/* End a node that the kernel does not refer to. Returns whether it has ended. The caller holds a reference. */
bool drop_unused(Tables *t, Node *node) {
    if (node->nlookup || node->n_open || node == t->root)
        return false;
    if (node->is_listed) {
        node->is_listed = node->has_long_timeout = node->was_sent = false;
        leave_nodeid(t, node);
        leave_source(t, node);
        drop_directory_fd(t, node);
        t->n_nodes--;
        node_put(node);
    }
    return true;
}

/* Detach a node whose last link was removed while it was not open: requests for it get its last attributes.
 *
 * From now on, an inode with its number, or even its handle, is another one. */
void detach_node(Tables *t, Node *node, const Stat *st) {
    if (node->final_stat == NULL)
        node->final_stat = allocate(NULL, sizeof *node->final_stat);
    *node->final_stat = *st;
    node->final_stat->nlink = 0;
    forget_all_names(t, node);
    leave_source(t, node);
}
