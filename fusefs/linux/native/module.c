/* The module _bulk: its functions, each described by its doc string. */
#include "bulk.h"

static PyMethodDef methods[] = {
    {"read", bulk_read, METH_VARARGS,
     "Some entries of a directory: names with these ends joined by slashes, inode numbers, types, number of entries."},
    {"look", bulk_look, METH_VARARGS, "Names that match bounds, their sizes, their disk space, and unsure names."},
    {"unlink", bulk_unlink, METH_VARARGS, "unlinkat of each name. Returns those that were refused, with the errno."},
    {"unlink_chosen", bulk_unlink_chosen, METH_VARARGS,
     "unlinkat of each name that matches bounds: number, size, disk space of those removed; those refused; unsure."},
    {"rename", bulk_rename, METH_VARARGS, "renameat2 of each name to the same name elsewhere. Returns those refused."},
    {"window", bulk_window, METH_VARARGS, "First entries of a directory: names in bundles, subdirectories, if all."},
    {"read_files", bulk_read_files, METH_VARARGS, "Bytes of NAME/TAIL of each directory; None if not small and plain."},
    {"lacking", bulk_lacking, METH_VARARGS, "The directories in which TAIL can't be opened, with the errno."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_bulk", .m_doc = "Calls for many names; see bulk.h.", .m_methods = methods,
};

PyMODINIT_FUNC PyInit__bulk(void) { return PyModule_Create(&module); }
