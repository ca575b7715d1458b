/* The module _bulk: its functions, each described by its doc string. */
#include "bulk.h"

static PyMethodDef methods[] = {
    {"read", bulk_read, METH_VARARGS,
     "Entries of a directory with this beginning and end: joined names; inode numbers; types; number of all entries."},
    {"look", bulk_look, METH_VARARGS, "Names that match bounds, their sizes, their disk space, and unsure names."},
    {"unlink", bulk_unlink, METH_VARARGS, "unlinkat for each name. Returns the refused names with their errnos."},
    {"unlink_chosen", bulk_unlink_chosen, METH_VARARGS,
     "unlinkat for each match. Returns number, size and disk space of removed files; refused names; unsure names."},
    {"rename", bulk_rename, METH_VARARGS, "renameat2 for each name, to another directory. Returns the refused names."},
    {"window", bulk_window, METH_VARARGS, "First entries of a directory: bundled names; subdirectories; whether all."},
    {"read_files", bulk_read_files, METH_VARARGS, "Contents of NAME/TAIL for each NAME; None if not small and plain."},
    {"lacking", bulk_lacking, METH_VARARGS, "Directories in which TAIL can't be opened, with the errno."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_bulk", .m_doc = "Calls for many names; see bulk.h.", .m_methods = methods,
};

PyMODINIT_FUNC PyInit__bulk(void) { return PyModule_Create(&module); }
