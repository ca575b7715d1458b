/* Changes to nodes: names are removed or changed; a node ends when the kernel forgets it. */
#include "core.h"

enum { PAIR_BYTES = 16, N_PART = 512, PAUSE_US = 500 }; /* of struct fuse_forget_one */

/* Return the node of an inode that has changed, and drop its cached attributes; NULL: no node. */
static Node *find_changed_node(Request *request, const Stat *st, bool has_ended) {
    Source source = source_of(st);
    note_source_change(request, &source, NULL, has_ended);
    Node *node = find_node(request->core->tables, &source);
    if (node != NULL)
        note_change(request, node);
    return node;
}

/* Note that an inode has lost a name. */
void note_removed(Request *request, const Stat *st, const Place *place) {
    Tables *t = request->core->tables;
    bool has_ended = S_ISDIR(st->mode) || st->nlink == 1;
    Node *node = find_changed_node(request, st, has_ended);
    if (node == NULL)
        return;
    forget_name(t, node, place->node, place->name);
    if (!node->n_open && has_ended)
        detach_node(t, node, st);
    if (node->is_directory)
        drop_directory_fd(t, node);
}

/* Note that an inode was renamed. */
void note_moved(Request *request, const Stat *st, const Place *old, const Place *new) {
    Tables *t = request->core->tables;
    Node *node = find_changed_node(request, st, false);
    if (node == NULL)
        return;
    move_node(t, node, old->node, old->name, new->node, new->name);
    note_stored(request, node, new->node, true);
    if (node->is_directory)
        node->changed_s = (double)now_ns() / 1e9;
    if (node->is_directory || node->was_sent)
        invalidate_attributes(t, node);
}

/* Note that an entry is being moved out of a store, where the reaper may have worked behind the mount: nothing that was
 * cached about the entry may be used. Usually the kernel has already forgotten it (tree/forget_stored.py). */
void note_left_trash(Request *request) {
    Tables *t = request->core->tables;
    request->has_left_trash = t->is_caching;
    if (t->is_trash_renewed && !__atomic_load_n(&request->core->mutex->is_slow, __ATOMIC_RELAXED))
        return;
    invalidate_zone(t, TRASH);
}

/* End a node without references. If Python may refer to it, Python does this after the tables lock is released. */
void end_unused(Request *request, Node *node) {
    if (node->nlookup || node->n_open)
        return;
    if (node->object == NULL && !node->is_mapped)
        drop_unused(request->core->tables, node);
    else
        request->unused_nodes[request->n_unused++] = node_take(node);
}

static void forget_one(Request *request, uint64_t nodeid, uint64_t n) {
    Node *node = node_of(request->core->tables, nodeid);
    if (node == NULL)
        return;
    node->nlookup -= n < node->nlookup ? n : node->nlookup;
    end_unused(request, node);
}

int do_forget(Request *request) {
    uint64_t n;
    memcpy(&n, request->op_in, sizeof n);
    forget_one(request, request->nodeid, n);
    return NO_REPLY;
}

/* Other threads get the tables between two parts. If there are many, a pause lets another thread read requests. */
int do_batch_forget(Request *request) {
    uint32_t n;
    memcpy(&n, request->op_in, sizeof n);
    if (n > request->n_payload / PAIR_BYTES)
        n = request->n_payload / PAIR_BYTES;
    for (uint32_t at = 0; at < n; at++) {
        uint64_t pair[2];
        memcpy(pair, request->payload + (size_t)at * PAIR_BYTES, sizeof pair);
        forget_one(request, pair[0], pair[1]);
        if (request->n_unused == N_FORGOTTEN_MAX || at % N_PART == N_PART - 1) {
            calls_begin(request);
            report_unused(request);
            if (at % N_PART == N_PART - 1)
                usleep(PAUSE_US);
            calls_end(request);
        }
    }
    return NO_REPLY;
}
