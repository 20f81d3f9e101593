"""A few seconds of a video as an animated picture of less than a megabyte, for a README.

python benchmark/animate.py VIDEO.mp4 PICTURE.gif
"""

import argparse
from pathlib import Path

from moviepy import VideoFileClip
from PIL import Image


def animate(video: Path, picture: Path, start, seconds, width: int, fps: int, colors: int) -> int:
    """Write `seconds` of the video from `start` on, or its end; returns the number of frames."""
    clip = VideoFileClip(str(video))
    start = max(0.0, min(start, clip.duration - seconds))
    size = width, round(width * clip.h / clip.w)
    frames = []
    for frame in clip.subclipped(start, min(start + seconds, clip.duration)).iter_frames(fps=fps):
        image = Image.fromarray(frame)
        frames.append(image.resize(size, Image.Resampling.LANCZOS))
    clip.close()
    palette = frames[0].quantize(colors)  # one for all frames: GIF leaves out what does not change
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    picture.parent.mkdir(parents=True, exist_ok=True)
    duration = round(1000 / fps)  # milliseconds
    frames[0].save(picture, save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return len(frames)


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("video", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--start", type=float, default=5.0, help="first second of the video")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=300)
    parser.add_argument("--fps", type=int, default=20)
    parser.add_argument("--colors", type=int, default=64)
    options = parser.parse_args()
    frames = animate(**vars(options))
    print(f"{options.picture}: {frames} frames, {options.picture.stat().st_size / 1000:.0f} kB")
