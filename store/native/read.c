/* Bytes of files, read: the counterpart of looking at them through a mapping. */

#include "native.h"

#include <errno.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif

/* read_at(fds, positions, sizes) -> the bytes at each place of each file, side by side; None where a file ends before, or
   cannot be read. All three are int64; by who has compared the sizes with what there is. */
PyObject *native_read_at(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("read_at", nargs, 3))
        return NULL;
    PyObject *result = NULL;
    Buffers held = {0};
    Py_buffer *fds, *positions, *sizes;
    if (!(fds = hold(&held, args[0], 8, -1, false, "fds")))
        goto done;
    Py_ssize_t count = fds->len / 8, total = 0, i = 0;
    if (!(positions = hold(&held, args[1], 8, count, false, "positions")) ||
        !(sizes = hold(&held, args[2], 8, count, false, "sizes")))
        goto done;
    const int64_t *fd = fds->buf, *at = positions->buf, *size = sizes->buf;
    for (; i < count; i++)
        if (size[i] < 0 || at[i] < 0 || __builtin_add_overflow(total, size[i], &total)) {
            PyErr_Format(PyExc_ValueError, "read_at: %lld bytes at %lld", (long long)size[i], (long long)at[i]);
            goto done;
        }
    if (!(result = PyBytes_FromStringAndSize(NULL, total)))
        goto done;
    char *to = PyBytes_AS_STRING(result);
    PyThreadState *others = PyEval_SaveThread();
    for (i = 0; i < count; i++)
        for (int64_t got = 0; got < size[i];) {
            ssize_t more = pread((int)fd[i], to, (size_t)(size[i] - got), (off_t)(at[i] + got));
            if (more <= 0) {
                if (more < 0 && errno == EINTR)
                    continue;
                goto failed;
            }
            got += more;
            to += more;
        }
failed:
    PyEval_RestoreThread(others);
    if (i < count)
        Py_SETREF(result, Py_NewRef(Py_None));
done:
    let_go(&held);
    return result;
}

/* Whether the file system is known to look at what is in the page cache, too, when it is asked for holes. */
static bool tells_holes(int fd)
{
#ifdef __linux__
    enum { EXT4 = 0xEF53, XFS = 0x58465342, TMPFS = 0x01021994 };
    struct statfs system;
    return !fstatfs(fd, &system) && (system.f_type == EXT4 || system.f_type == XFS || system.f_type == TMPFS);
#else
    return false;
#endif
}

/* data_end(fd, start, end) -> a position in the range behind which the file has nothing but holes, and blocks that were
   allocated and never written to: they read as zeros, and reading them would fill the page cache with these. `end` where that
   cannot be told. */
PyObject *native_data_end(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { PATIENCE = 1 << 14 }; /* as many pages as every second one of a segment: on a full tmpfs a look at a hole is SIGBUS */
    if (!has_arguments("data_end", nargs, 3))
        return NULL;
    long fd = PyLong_AsLong(args[0]);
    int64_t start = PyLong_AsLongLong(args[1]), end = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    int64_t found = end;
    PyThreadState *others = PyEval_SaveThread();
    if (tells_holes((int)fd)) {
        int64_t last = start, at = start;
        for (int left = PATIENCE; left && last < end; left--) {
            int64_t data = lseek((int)fd, (off_t)at, SEEK_DATA);
            if (data < 0 ? errno == ENXIO : data >= end) {
                found = last;
                break;
            }
            if (data < 0 || (at = lseek((int)fd, (off_t)data, SEEK_HOLE)) < 0)
                break;
            last = at;
        }
    }
    PyEval_RestoreThread(others);
    return PyLong_FromLongLong(found < end ? found : end);
}
