# Sourced: NVIDIA_DRIVER, the version of NVIDIA's driver, or nothing; OLD_DRIVER, the same if it is too old for CUDA 13.
NEEDED_DRIVER=580
NVIDIA_DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
OLD_DRIVER=
case ${NVIDIA_DRIVER%%.*} in
    *[!0-9]* | '') ;; # none, or an error of nvidia-smi
    *) [ "${NVIDIA_DRIVER%%.*}" -ge $NEEDED_DRIVER ] || OLD_DRIVER=$NVIDIA_DRIVER ;;
esac
