# Steps of a parallel program: its processes, in so many groups, write a file of each group in each step, by MPI-IO or HDF5.
# Both libraries are called as they are: `ctypes` needs no package beside them.
import ctypes, os, sys, time

how, groups, size, steps, pause, stride, keep, name = sys.argv[1:9]
groups, size, steps, pause, stride, keep = int(groups), int(size), int(steps), float(pause), int(stride), int(keep)
mpi = ctypes.CDLL('libmpich.so.12', ctypes.RTLD_GLOBAL)
# Values of mpi.h of MPICH.
WORLD, BYTE, NO_INFO, CREATE, WRITE, NO_STATUS = 0x44000000, 0x4C00010D, 0x1C000000, 1, 4, ctypes.c_void_p(1)


def call(function, *arguments):
    if getattr(mpi, function)(*arguments) != 0:
        sys.exit(function)


def ask(function, *arguments):
    found = ctypes.c_int()
    call(function, *arguments, ctypes.byref(found))
    return found.value


def with_mpi(path, group, place, members):
    file = ctypes.c_void_p()
    call('MPI_File_open', group, path, CREATE | WRITE, NO_INFO, ctypes.byref(file))
    call('MPI_File_write_at_all', file, ctypes.c_longlong(place * size), bytes(size), size, BYTE, NO_STATUS)
    call('MPI_File_close', ctypes.byref(file))


def with_hdf5(path, group, place, members):
    hdf5 = ctypes.CDLL('libhdf5_mpich.so.103')
    Id, Size = ctypes.c_int64, ctypes.c_uint64

    def of(function, *arguments, result=Id):
        entry = getattr(hdf5, function)
        entry.restype = result
        found = entry(*arguments)
        if found < 0:
            sys.exit(function)
        return Id(found)

    def value(constant):
        return Id(Id.in_dll(hdf5, constant).value)

    of('H5open', result=ctypes.c_int)
    access = of('H5Pcreate', value('H5P_CLS_FILE_ACCESS_ID_g'))
    of('H5Pset_fapl_mpio', access, group, NO_INFO, result=ctypes.c_int)
    file = of('H5Fcreate', path, 2, Id(0), access)
    there = of('H5Screate_simple', 1, (Size * 1)(size * members), None)
    data = of('H5Dcreate2', file, b'data', value('H5T_NATIVE_INT8_g'), there, Id(0), Id(0), Id(0))
    here = of('H5Screate_simple', 1, (Size * 1)(size), None)
    of('H5Sselect_hyperslab', there, 0, (Size * 1)(place * size), None, (Size * 1)(size), None, result=ctypes.c_int)
    of('H5Dwrite', data, value('H5T_NATIVE_INT8_g'), here, there, Id(0), bytes(size), result=ctypes.c_int)
    for function, what in (('H5Dclose', data), ('H5Fclose', file), ('H5Pclose', access)):
        of(function, what, result=ctypes.c_int)


call('MPI_Init', None, None)
rank, ranks = ask('MPI_Comm_rank', WORLD), ask('MPI_Comm_size', WORLD)
if ranks != int(os.environ['SLURM_NTASKS']):
    sys.exit('it does not run as one program of %s processes' % os.environ['SLURM_NTASKS'])
members = ranks // groups
group, place = divmod(rank, members)
of_group = ask('MPI_Comm_split', WORLD, group, rank)


def path(step):
    number = step * stride
    return name.format(step=number, group=group, slot=step % 2, letter='ab'[step % 2])


for step in range(1, steps + 1):
    time.sleep(pause)
    if place == 0:
        os.makedirs(os.path.dirname(path(step)) or '.', exist_ok=True)
    call('MPI_Barrier', WORLD)
    {'mpi': with_mpi, 'hdf5': with_hdf5}[how](path(step).encode(), of_group, place, members)
    if place == 0 and 0 < keep < step:
        os.remove(path(step - keep))
call('MPI_Finalize')
