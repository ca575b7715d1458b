/* What happens to nodes: they lose names, get other names, and end when the kernel forgets them. */
#include "core.h"

enum { PAIR_BYTES = 16, N_PART = 512, PAUSE_US = 500 }; /* of struct fuse_forget_one */

/* Find the node of an inode that has changed, and have its cached attributes forgotten; NULL: no node. */
static Node *node_seen(Request *request, const Seen *seen, bool has_ended) {
    Source source = source_of(seen);
    forget_source(request, &source, NULL, has_ended);
    Node *node = find_node(request->core->tables, &source);
    if (node != NULL)
        note_change(request, node);
    return node;
}

/* An inode has lost a name. */
void lose(Request *request, const Seen *seen, const Place *place) {
    Tables *t = request->core->tables;
    bool has_ended = S_ISDIR(seen->mode) || seen->nlink == 1;
    Node *node = node_seen(request, seen, has_ended);
    if (node == NULL)
        return;
    take_away_name(t, node, place->node, place->name);
    if (!node->n_open && has_ended)
        detach_node(t, node, seen);
    if (node->is_directory)
        drop_directory_fd(t, node);
}

/* An inode was renamed. */
void move(Request *request, const Seen *seen, const Place *old, const Place *new) {
    Tables *t = request->core->tables;
    Node *node = node_seen(request, seen, false);
    if (node == NULL)
        return;
    move_node(t, node, old->node, old->name, new->node, new->name);
    note_stored(request, node, new->node, true);
    if (node->is_directory)
        node->changed_s = (double)now_ns() / 1e9;
    if (node->is_directory || node->is_told)
        renew(t, node);
}

/* Something is being moved out of a store, where the reaper may have worked behind the mount: nothing that was cached
 * of it may be used. Usually the kernel has forgotten it already (tree/forget_stored.py). */
void come_back(Request *request) {
    Tables *t = request->core->tables;
    request->has_come_back = t->is_caching;
    if (t->is_trash_renewed && !__atomic_load_n(&request->core->mutex->is_slow, __ATOMIC_RELAXED))
        return;
    renew_lasting(t, TRASH);
}

/* End a node without references; or if Python may refer to it, have that done after the tables lock was released. */
void end_unused(Request *request, Node *node) {
    if (node->nlookup || node->n_open)
        return;
    if (node->object == NULL && !node->is_mapped)
        drop_unused(request->core->tables, node);
    else
        request->unused[request->n_unused++] = node_take(node);
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
    memcpy(&n, request->own, sizeof n);
    forget_one(request, request->nodeid, n);
    return NO_ANSWER;
}

/* Other threads get the tables between two parts; if there are many, a pause lets another thread read requests. */
int do_batch_forget(Request *request) {
    uint32_t n;
    memcpy(&n, request->own, sizeof n);
    if (n > request->n_payload / PAIR_BYTES)
        n = request->n_payload / PAIR_BYTES;
    for (uint32_t at = 0; at < n; at++) {
        uint64_t pair[2];
        memcpy(pair, request->payload + (size_t)at * PAIR_BYTES, sizeof pair);
        forget_one(request, pair[0], pair[1]);
        if (request->n_unused == N_FORGOTTEN_MAX || at % N_PART == N_PART - 1) {
            calls_begin(request);
            tell_unused(request);
            if (at % N_PART == N_PART - 1)
                usleep(PAUSE_US);
            calls_end(request);
        }
    }
    return NO_ANSWER;
}
